"""The measures of a campaign: what each row is asked, and how two rows are compared in it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import dotmoe
from campaign_rows import Amounts, Row
from dotmoe.common.errors import UserError
from dotmoe.common.files import Values, read_json, remove
from dotmoe.common.progress import Progress
from dotmoe.export.llama_cpp import is_installed
from dotmoe.measure.evaluate.difference import (
    difference,
    error_over,
    require_asked_alike,
    score_difference,
)
from dotmoe.measure.evaluate.models import model_folder, sides_of
from dotmoe.measure.evaluate.own_answers import (
    DenseStates,
    dense_end,
    on_own_answers,
    states_on,
)
from dotmoe.measure.evaluate.tasks import main_scores
from dotmoe.models.chat import end_tokens, has_chats
from dotmoe.models.config import LoadConfig
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.identity import fingerprint
from dotmoe.models.load import describe_dense, load_dense
from dotmoe.pipeline.compare import text_tokens
from dotmoe.run.config import RunConfig
from dotmoe.run.folder import RESULTS, RunFolder
from dotmoe.text.answers import ALIKE, OTHERS, Answer, OwnAnswers
from dotmoe.text.answers_of_run import own_answers
from dotmoe.text.config import DataConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from vllm_parity import ENVIRONMENT  # noqa: E402 - from that folder

PYTHON_TEXT = "python-stdlib-heldout"
DECODE: dict[str, Any] = {"batch_sizes": (1,), "prompt_tokens": 0, "threads": 1, "clock": "cpu"}
"""How `dotmoe bench` measures the speed of two GGUF files."""
VLLM_CONTEXT, VLLM_STEPS, VLLM_ROUNDS, VLLM_BATCHES = 128, 32, 3, (1, 8, 32)
SPEED_TYPE = "q8_0"
"""Number format of the files whose decode speed is measured."""

Difference = tuple[float, float | None]
"""A difference of two rows, and its standard error."""
WhyNot = Callable[["Subject"], str]
"""Why a measure of a row cannot be made; empty if it can."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A finished row, and the campaign that it is part of."""

    row: Row
    place: Path | str
    """The model, as `dotmoe evaluate` takes it: the run folder, the dense model, or a file."""
    folder: Path
    """Folder of the campaign."""
    model: str
    """The dense model."""
    amounts: Amounts
    data: tuple[str, ...]
    texts: dict[str, str | None]
    """Sources of held-out text, by the name of the measure; None: not given."""
    task_data: str | None = None
    vllm_python: str | None = None
    dtype: str = "auto"
    source: "Subject | None" = None
    """The row that it is made of."""
    cache: dict[str, Any] = field(default_factory=dict)
    """What several rows read, of this process."""

    @property
    def is_dense(self) -> bool:
        """Whether this is the dense model as it was given."""
        return self.row.by == "nothing"

    @cached_property
    def run(self) -> RunFolder | None:
        """The run folder of the row, if a run made it."""
        found = RunFolder(Path(self.place))
        return found if Path(self.place).is_dir() and found.exists else None

    @cached_property
    def results(self) -> Values:
        """What the run measured of itself; empty if no run made the row."""
        if self.run is None:
            return {}
        return read_json(self.run.path_of("evaluate") / RESULTS)

    @property
    def dense(self) -> DenseModel:
        """The dense model, without its weights."""
        if "dense" not in self.cache:
            self.cache["dense"] = describe_dense(self.model)
        found: DenseModel = self.cache["dense"]
        return found

    @property
    def is_chat(self) -> bool:
        """Whether the model answers questions."""
        return has_chats(self.dense.tokenizer)

    def out(self, measure: str) -> Path:
        """A folder for the files of a measure."""
        return self.folder / "measures" / self.row.name / measure


# --- closeness on own answers -------------------------------------------------------------------


def answers(it: Subject) -> Values:
    """KL per answer token, top-1 and the share of answers that end, on held-out own answers."""
    by_name = it.results.get("own_answers", {})
    for name in ("moe", "pruned"):
        if name in by_name:
            return {**by_name[name], "source": "the run's own results"}
    own, taught = _taught(it)
    if it.is_dense:
        sets = {ALIKE: own.alike, OTHERS: own.others}
        measured = {
            name: _of_dense(it, each, getattr(own, f"{name}_penalised"))
            for name, each in sets.items()
            if each
        }
        return {**measured, "source": "by definition; the answers themselves"}
    exports = {"moe": model_folder(str(it.place))}
    return {**on_own_answers(taught, it.dense.tokenizer, exports, own, seed=0)["moe"]}


def _of_dense(it: Subject, answers: Sequence[Answer], penalised: Sequence[Answer]) -> Values:
    """What holds of the dense model's own answers, and which of them end."""
    as_dense = {"more_unfinished": 0.0, "more_unfinished_stderr": 0.0}
    return {
        "kl": 0.0,
        "kl_stderr": 0.0,
        "top1": 1.0,
        "times_dense": 1.0,
        "answers": len(answers),
        "ended": _share_that_ends(it, answers),
        **as_dense,
        "with_penalty": {"ended": _share_that_ends(it, penalised), **as_dense},
    }


def _share_that_ends(it: Subject, answers: Sequence[Answer]) -> float:
    """Share of the dense model's answers that have text and an end, as the others are counted."""
    tokenizer = it.dense.tokenizer
    ends = end_tokens(it.dense.model, tokenizer)
    return sum(dense_end(tokenizer, answer, ends) for answer in answers) / len(answers)


def _taught(it: Subject) -> tuple[OwnAnswers, dict[str, DenseStates]]:
    """The held-out answers, which every run finds again, and the dense model's states on them."""
    if "taught" not in it.cache:
        dense = load_dense(it.model, LoadConfig(dtype=it.dtype))  # type: ignore[arg-type]
        own = own_answers(
            dense,
            DataConfig(data=it.data),
            identity=fingerprint(dense.folder),
            tokens=0,
            heldout=it.amounts.heldout_answers,
            seed=0,
            progress=Progress(quiet=True),
        )
        it.cache["taught"] = own, states_on(dense, own)
    found: tuple[OwnAnswers, dict[str, DenseStates]] = it.cache["taught"]
    return found


def no_answers(it: Subject) -> str:
    """Why there are no own answers."""
    return "" if it.is_chat else "the model has no chat template, so it answers nothing"


def answers_apart(one: Values, other: Values) -> dict[str, Difference]:
    """KL of one row above another's, paired over answers."""
    found = {}
    for name in (ALIKE, OTHERS):
        if "answer_kls" not in one.get(name, {}) or "answer_kls" not in other.get(name, {}):
            continue
        ours, theirs = one[name], other[name]
        if ours["answer_tokens"] != theirs["answer_tokens"]:
            continue
        kls = zip(ours["answer_kls"], theirs["answer_kls"], strict=True)
        error = error_over([a - b for a, b in kls], ours["answer_tokens"])
        found[f"kl_{name}"] = ours["kl"] - theirs["kl"], error
    return found


# --- text ---------------------------------------------------------------------------------------


def text(name: str) -> Callable[[Subject], Values]:
    """The measure of perplexity on the text of this name."""

    def measure(it: Subject) -> Values:
        source = it.texts[name]
        assert source is not None
        how = it.amounts
        window = min(how.window, it.dense.widths.context)
        found = dotmoe.evaluate(
            it.place,
            text=source,
            window=window,
            max_tokens=how.windows * window,
            dtype=it.dtype,
            progress=False,
        )
        (values,) = sides_of(found["perplexity"])
        return dict(values)

    return measure


def no_text(name: str) -> WhyNot:
    """Why there is no text of this name."""
    return lambda it: "" if it.texts[name] else f"give --{name} FILE"


def text_apart(one: Values, other: Values) -> dict[str, Difference]:
    """Loss of one row above another's, paired over windows."""
    return {"nats": difference(one, other)}


# --- tasks --------------------------------------------------------------------------------------


def tasks(*names: str, generates: bool = False) -> Callable[[Subject], Values]:
    """The measure of scores in these tasks, without solved examples."""

    def measure(it: Subject) -> Values:
        asked = names
        options: dict[str, Any] = {"shots": 0, "limit": it.amounts.questions}
        if generates and it.is_chat:
            options["chat_template"] = True
            asked = tuple(CHAT_TASKS.get(name, name) for name in names)
        found = dotmoe.evaluate(
            it.place,
            tasks=asked,
            task_data=it.task_data,
            dtype=it.dtype,
            out=it.out("tasks" if not generates else names[0]),
            progress=False,
            **options,
        )
        return dict(found["tasks"]["model"])

    return measure


CHAT_TASKS = {"humaneval": "humaneval_instruct"}
"""What a chat model is asked instead."""


def tasks_apart(one: Values, other: Values) -> dict[str, Difference]:
    """Mean score of one row above another's, paired over questions in each task."""
    ours, theirs = main_scores(one["tasks"]), main_scores(other["tasks"])
    if not ours or ours.keys() != theirs.keys():
        return {}
    for name in one["tasks"].keys() & other["tasks"].keys():
        require_asked_alike(one["tasks"][name], other["tasks"][name])
    pairs = [score_difference(ours[name], theirs[name]) for name in ours]
    changes, errors = zip(*pairs, strict=True)
    error = None
    if None not in errors:
        error = sum(each**2 for each in errors) ** 0.5 / len(errors)
    return {"score": (sum(changes) / len(changes), error)}


# --- speed, size and cost -----------------------------------------------------------------------


def llama_cpp(it: Subject) -> Values:
    """Tokens per second of decode in llama.cpp, one sequence and one thread, beside the dense."""
    files = []
    for form in ("gguf_dense", "gguf"):
        out = it.out("llama_cpp") / form
        remove(out)
        dotmoe.export(it.place, out, format=form, gguf_type=SPEED_TYPE, progress=False)
        files.append(out)
    point = dict(dotmoe.bench(*files, progress=False, **DECODE)["points"][0])
    remove(it.out("llama_cpp"))
    return {"gguf_type": SPEED_TYPE, **point}


def no_llama_cpp(it: Subject) -> str:
    """Why nothing runs in llama.cpp."""
    if not is_installed():
        return "llama-cpp-python is not installed (pip install -e '.[llama-cpp]')"
    if it.row.by not in ("convert", "finetune"):
        return "conversions alone are timed, each beside the dense model"
    return ""


def vllm(it: Subject) -> Values:
    """Tokens per second of decode in vLLM; weights are random, as the speed needs none."""
    assert it.vllm_python is not None
    folder = model_folder(str(it.place))
    numbers = (VLLM_CONTEXT, VLLM_STEPS, VLLM_ROUNDS, *VLLM_BATCHES)
    command = [it.vllm_python, str(ROOT / "benchmarks/vllm_speed.py"), str(folder), "bfloat16"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, *map(str, numbers)],
        env=environment | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"vLLM ended with status {done.returncode}: {last}")
    found: Values = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def no_vllm(it: Subject) -> str:
    """Why nothing runs in vLLM."""
    if it.vllm_python is None:
        return "give --vllm-python, the interpreter of an environment with vLLM"
    if it.row.by == "quantise":
        return "vLLM runs no GGUF file here"
    return ""


def size(it: Subject) -> Values:
    """Bytes on disk of the weights, and the parameters of a run."""
    place = Path(it.place)
    if not place.is_file():
        place = model_folder(str(it.place))
    files = [place] if place.is_file() else [*place.glob("*.safetensors"), *place.glob("*.gguf")]
    parameters = it.results.get("parameters", {})
    return {"bytes": sum(file.stat().st_size for file in files), "parameters": parameters}


def cost(it: Subject) -> Values:
    """CPU hours and tokens of text that the row and the run that it is made of were given.

    Own answers are written once and kept for all runs: the run that came first has their seconds.
    """
    hours, tokens, seconds = 0.0, 0, dict[str, float]()
    if it.run is not None:
        stages = it.run.manifest["stages"].items()
        made = {name: stage for name, stage in stages if name != "evaluate"}
        seconds = {name: stage["seconds"] for name, stage in made.items()}
        hours = sum(map(_cpu_seconds, made.values())) / 3_600
        tokens = _tokens_read(it)
    if it.source is not None and it.row.by in ("finetune", "drop_idle"):
        before = cost(it.source)
        hours, tokens = hours + before["cpu_hours"], tokens + before["tokens"]
    return {"cpu_hours": hours, "tokens": tokens, "stages": seconds}


def _cpu_seconds(stage: Values) -> float:
    """CPU seconds of a stage; threads times time where they were not recorded."""
    by_threads = stage["seconds"] * stage["provenance"]["threads"]
    return float(stage.get("cpu_seconds", by_threads))


def _tokens_read(it: Subject) -> int:
    """Tokens that a run read; what a stage reads repeatedly counts once."""
    results = it.results
    if it.row.by == "finetune":
        return int(results["tokens"])
    if it.row.by == "prune":
        return int(results["pruning"]["calibration_tokens"])
    assert it.run is not None
    config = it.run.config(RunConfig)
    read = text_tokens(config, results["steps"], it.dense)
    return read + int(results.get("repair", {}).get("tokens", 0))


# --- all of them --------------------------------------------------------------------------------

Compare = Callable[[Values, Values], dict[str, Difference]]


def not_compared(one: Values, other: Values) -> dict[str, Difference]:
    """Nothing: two rows lie beside each other in the table."""
    return {}


def possible(it: Subject) -> str:
    """No reason."""
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """Something that each row is asked."""

    name: str
    make: Callable[[Subject], Values]
    apart: Compare = not_compared
    why_not: WhyNot = possible
    reads: tuple[str, ...] = ()
    """Settings of the campaign that change what is measured."""


MEASURES = {
    each.name: each
    for each in (
        Measure(name="cost", make=cost),
        Measure(name="size", make=size),
        Measure(
            name="answers",
            make=answers,
            apart=answers_apart,
            why_not=no_answers,
            reads=("heldout_answers",),
        ),
        *(
            Measure(
                name=name,
                make=text(name),
                apart=text_apart,
                why_not=no_text(name),
                reads=("windows", "window", name),
            )
            for name in ("wiki", "books", "python")
        ),
        Measure(
            name="tasks", make=tasks("paper"), apart=tasks_apart, reads=("questions", "task_data")
        ),
        *(
            Measure(
                name=name,
                make=tasks(name, generates=True),
                apart=tasks_apart,
                reads=("questions", "task_data"),
            )
            for name in ("gsm8k", "humaneval")
        ),
        Measure(name="llama_cpp", make=llama_cpp, why_not=no_llama_cpp),
        Measure(name="vllm", make=vllm, why_not=no_vllm),
    )
}
"""Measures by name, in the order in which they are made."""
