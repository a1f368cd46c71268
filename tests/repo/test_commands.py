"""Every command that a document prints: parsed by the real parser, its split held against the model
that it names; those of README and reference run on a tiny model, in their order. Python that a
document prints runs, but for what takes long."""

import json
import re
import shlex
import tomllib
from functools import lru_cache
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from transformers import LlamaConfig

from dotmoe.cli import COMMANDS, arguments, run
from dotmoe.export.choice import format_for
from dotmoe.measure.config import InspectConfig
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.family import family_of
from dotmoe.models.meta_model import meta_model
from dotmoe.pipeline.points import points_of
from dotmoe.run.config import CompareConfig, RunConfig
from dotmoe.run.defaults import splits_for
from runs import TINY_CONVERT, TINY_FINETUNE, words

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted((ROOT / "experiments").rglob("README.md")),
]
WIDTHS = {  # public: model width, FFN width, layers
    "MODEL": (3_584, 18_944, 28),
    "Qwen/Qwen2.5-7B": (3_584, 18_944, 28),
    "Qwen/Qwen2.5-32B": (5_120, 27_648, 64),
    "meta-llama/Llama-2-7b-hf": (4_096, 11_008, 32),
    "meta-llama/Meta-Llama-3-8B": (4_096, 14_336, 32),
    "embedded": (192, 768, 5),
    "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (576, 1_536, 30),
}
OPTIONS = json.loads((ROOT / "tests/contract/golden/options.json").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TAKES_LONG = [
    *("dotmoe.convert", "dotmoe.finetune", "dotmoe.measure.analyse.analyse"),
    *("dotmoe.compare", "transformers.AutoTokenizer.from_pretrained"),
    "transformers.AutoModelForCausalLM.from_pretrained",
]
PLACEHOLDERS = {"NAME": "cmoe", "K": "3", "R": "2"}


def fenced(text):
    """Command lines of a document's code blocks, also after a prompt, comments taken off."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    prompts = {"": "", "text": "", "console": r"\$ "}
    for prompt, block in ((prompts[at], block) for at, block in blocks if at in prompts):
        lines = block.replace("\\\n", " ")
        for line in re.findall(rf"^{prompt}((?:dotmoe|torchrun|python|pip|make) .*)", lines, re.M):
            yield shlex.split(line, comments=True)


def inline(text):
    """Commands within a sentence; many only name an option."""
    for code in re.findall(r"(?<!`)`((?:dotmoe|torchrun) [^`]+)`", text):
        yield shlex.split(" ".join(code.split()))


def of_dotmoe(line):
    """The words after `dotmoe`, None for another program's line."""
    for start in (["dotmoe"], ["-m", "dotmoe"]):
        for at in range(len(line)):
            if line[at : at + len(start)] == start and (at == 0 or line[0] == "torchrun"):
                return line[at + len(start) :]
    return None


def printed():
    """File and words of every whole command of dotmoe, and of the runs of the experiments."""
    for file in DOCUMENTS:
        text = file.read_text(encoding="utf-8")
        name = str(file.relative_to(ROOT))
        whole = [line for line in inline(text) if re.search("[A-Z]{3} --", " ".join(line))]
        for line in [*fenced(text), *whole]:
            arguments = of_dotmoe(line)
            if arguments and arguments[0] in COMMANDS and len(arguments) > 1:
                yield name, arguments
    for run_name, entry in tomllib.loads((ROOT / "experiments/runs.toml").read_text()).items():
        line = entry["command"].replace("{seed}", "0").replace("{out}", "OUT")
        command = shlex.split(re.sub(r"\{(\w+)\}", "RUN", line))
        if command[0] == "dotmoe":
            yield f"runs.toml, {run_name}", command[1:]


PRINTED = {f"{name}: {' '.join(arguments)}": arguments for name, arguments in printed()}


def config_of(words):
    """The config that a line's own command makes of it."""
    name, *rest = [PLACEHOLDERS.get(word, word) for word in words if word != "..."]
    if "..." in words and name == "compare":
        rest += ["--data", "text.jsonl", "--eval-text", "held-out.txt"]
    if "--config" in rest:  # a file of a run
        rest = rest[: rest.index("--config")]
    if name == "convert" and not rest:
        rest = ["MODEL", "OUT"]
    return arguments.config_of(name, rest)


def conversions(config):
    """The configs of all conversions that a command makes."""
    if isinstance(config, CompareConfig):
        return [point.config for point in points_of(config)]
    return [config] if isinstance(config, RunConfig | InspectConfig) else []


@lru_cache
def described(model):
    """A model that documents name, by its widths alone."""
    width, ffn, layers = WIDTHS[model]
    sizes = {"hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, num_attention_heads=6 if model == "embedded" else 32)
    family = family_of(config)
    return DenseModel(model=meta_model(config), weights="meta", family=family, source=model)


@pytest.mark.parametrize("arguments", PRINTED.values(), ids=PRINTED)
def test_a_printed_command_is_taken_and_its_split_can_be_exported(arguments):
    every = conversions(config_of(arguments))
    for config in {(each.model, each.experts, each.export): each for each in every}.values():
        dense, dtype = described(config.model), torch.bfloat16
        splits = splits_for("dot_moe", config, dense, dtype)
        assert format_for(dense, splits, config.export.format, dtype)  # else it refuses


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_else_a_document_tells_to_type_exists(file):
    text = file.read_text(encoding="utf-8")
    for name, *rest in filter(None, map(of_dotmoe, [*fenced(text), *inline(text)])):
        if name in COMMANDS:  # `dotmoe COMMAND` is none
            options = {word for word in rest if re.match("--[a-z]", word)}
            assert options <= {*OPTIONS[name], "--help", "--help-all", "--recipe", "--config"}
    lines = [*filter(None, map(of_dotmoe, fenced(text)))]
    exported = {line[2] for line in lines if line[0] == "export"}  # which are no runs
    assert not exported & {line[1] for line in lines if line[0] in ("analyse", "export", "report")}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for program, first, *rest in fenced(text):
        if program == "make":
            target = "results/%" if first.startswith("results/") else first
            assert re.search(rf"^{target}:|:= {target}$", makefile, re.MULTILINE)
        if program == "python" and first != "-m":
            source = (ROOT / first).read_text(encoding="utf-8")
            assert all(word in source for word in rest if word.startswith("--"))
    for extras in re.findall(r"\.\[([a-z,-]+)\]", text):
        assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])


def python_of(file):
    return re.findall(r"^```python\n(.*?)^```$", file.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("file", [*filter(python_of, DOCUMENTS)], ids=lambda file: file.stem)
def test_python_of_a_document_runs_but_for_what_takes_long(file, monkeypatch):
    for name in TAKES_LONG:
        monkeypatch.setattr(name, MagicMock())
    names = {}
    for block in python_of(file):
        exec(compile(block, file, "exec"), names)


def test_no_hint_installs_from_an_index_where_nothing_is_published():
    sources = [*(ROOT / "src").rglob("*.py"), *DOCUMENTS]
    hints = [re.findall(r"pip install \S+", path.read_text(encoding="utf-8")) for path in sources]
    assert sum(map(len, hints)) > 10
    assert not [hint for found in hints for hint in found if "dotmoe" in hint]


@pytest.mark.usefixtures("forked_workers")
def test_the_commands_of_readme_and_reference_run_in_their_order(tiny_dense, tmp_path, monkeypatch):
    model = str(tiny_dense("llama", intermediate_size=768))
    short = {name: value for name, value in TINY_CONVERT.items() if name != "expert_size"}
    of_alignment = ("steps", "lr", "batch_size", "checkpoint_every")
    not_aligned = {name: value for name, value in short.items() if name not in of_alignment}
    less = {
        "convert": short,
        "compare": not_aligned | {"methods": ["random_split"]},
        "finetune": TINY_FINETUNE,
        "evaluate": {"max_tokens": 256},
        "analyse": {"tokens": 256},
        "bench": {"rounds": 2, "batch_sizes": 1, "prompt_tokens": 8, "context_tokens": [8]},
    }
    ran = []
    for page in (ROOT / "README.md", ROOT / "docs/reference/commands.md"):
        folder = tmp_path / page.stem
        folder.mkdir()
        monkeypatch.chdir(folder)
        for name in ("text.jsonl", "held-out.txt"):
            text = "\n".join(f"{name} {i}: the hen ate {i * 7 % 13} figs." for i in range(300))
            Path(name).write_text(json.dumps({"text": text}) if name == "text.jsonl" else text)
        for name, *rest in filter(None, map(of_dotmoe, fenced(page.read_text(encoding="utf-8")))):
            if name == "quickstart" or "--tasks" in rest:
                continue  # minutes; questions that are not here
            line = [name, *(model if word == "MODEL" else word for word in rest)]
            reads_text = name != "evaluate" or "--text" in rest
            options = less.get(name, {}) if reads_text else {}
            assert run([*line, *words(**options)]) == 0, line
            ran.append(name)
    assert set(ran) == set(COMMANDS) - {"quickstart"}
