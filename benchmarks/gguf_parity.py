"""GGUF in llama.cpp against Transformers: logits, greedy text, perplexity by number format.

Every model is converted without training (`--steps 0`) and written in each GGUF format:

    python benchmarks/gguf_parity.py
    python benchmarks/gguf_parity.py --model path/to/stories260K --text path/to/text.txt

Finished runs of a real model (tokens, chat, perplexity on a text, size, speed):

    python benchmarks/gguf_parity.py --runs FROZEN REPAIRED --text wiki.test.raw.txt.gz --out FILE

Results are printed and kept in results/gguf_parity.json. Needs `pip install -e '.[llama-cpp]'`.
"""

import gzip
import importlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

import dotmoe
from dotmoe.cli import run
from dotmoe.common.files import read_json
from dotmoe.export.llama_cpp import LlamaCppModel
from dotmoe.measure.bench import BenchConfig, bench
from dotmoe.measure.evaluate.models import row_nats, stock_nats
from dotmoe.method.granularity import ExpertsConfig
from dotmoe.method.masked import masked_by
from dotmoe.models.load import load_dense, load_described
from dotmoe.models.tokenizer import PROBES
from dotmoe.run.finished import FinishedRun
from rounds import keep

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
NEW_TOKENS = 200
PROMPT_TOKENS = 32
PROMPTS = 3
PERPLEXITY_TOKENS = 8192
SCORED_TOKENS = 2048
BENCH = BenchConfig(dense="", moe="", batch_sizes=(1,), prompt_tokens=0, threads=1, clock="cpu")
FEW_TOKENS = ("--scale-tokens", "64", "--verify-tokens", "64")
Logits = Callable[[Tensor], Tensor]
"""Token ids [T] -> logits [T, V]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Which models and number formats to compare, and on what text."""

    model: str = "embedded"
    """`embedded`, or the folder of a dense model."""
    text: str | None = None
    """Text file to measure on, if the model is not `embedded`."""
    experts: int | None = None
    """Experts per layer. Default: the recipe's."""
    types: tuple[str, ...] = TYPES
    new_tokens: int = NEW_TOKENS
    runs: tuple[Path, ...] = ()
    """Finished runs of one real model, instead of `model`; needs `text`, a .gz."""
    out: Path = Path("results/gguf_parity.json")


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        if settings.runs:
            of_runs(settings, Path(scratch))
            return
        found = measured(settings, Path(scratch))
    before = read_json(settings.out) if settings.out.exists() else {}
    keep(settings.out, before | {Path(settings.model).name: found})


def measured(settings: Settings, scratch: Path) -> dict[str, Any]:
    """All metrics of one model."""
    config = dotmoe.recipe("quickstart", out=str(scratch / "run"))
    if settings.model != "embedded":
        small = dotmoe.recipe("small", out=str(scratch / "run"))
        data = replace(small.data, data=(str(settings.text),))
        config = replace(small, model=settings.model, data=data)
    if settings.experts is not None:
        config = replace(config, experts=ExpertsConfig(experts=settings.experts, active=0.25))
    made = dotmoe.convert(replace(config, align=replace(config.align, steps=0)))
    dense = load_dense(config.model, dotmoe.LoadConfig(device="cpu", dtype="float32"))
    layout = dotmoe.ExpertLayout.load(made.folder / "3_extract/layout.safetensors")
    (rows_BT,) = load_file(made.folder / "0_data/heldout.safetensors").values()
    rows_BT = rows_BT[: PERPLEXITY_TOKENS // rows_BT.shape[1], : dense.widths.context]
    found: dict[str, Any] = {
        "text": [Path(text).name for text in config.eval_text or config.data.data],
        "split": f"E {layout.num_experts}, s {layout.expert_size}, k {layout.active_experts}",
        "window": rows_BT.shape[1],
        "perplexity": {"dense in Transformers": mean_of(stock_nats(dense.model), rows_BT)},
        "formats": {},
    }
    with masked_by(dense, layout):
        found["perplexity"]["moe in Transformers"] = mean_of(stock_nats(dense.model), rows_BT)
        masked = looked_at(transformers_logits(dense.model), rows_BT, settings.new_tokens)
    for name in ("gguf_glm4moe", "gguf_llama"):
        with in_llama_cpp(made.folder, scratch, name, "f32", rows_BT.shape[1]) as model:
            mine = looked_at(model.logits, rows_BT, settings.new_tokens)
        found["formats"][name] = parity(mine, masked)
        print(name, json.dumps(found["formats"][name]))
    for kind in settings.types:
        for name in ("gguf_dense", "gguf"):
            with in_llama_cpp(made.folder, scratch, name, kind, rows_BT.shape[1]) as model:
                value = mean_of(row_nats(model.logits), rows_BT)
            found["perplexity"][f"{name} {kind}"] = value
            print(name, kind, value)
    return found


def of_runs(settings: Settings, scratch: Path) -> None:
    """One row per file, written at once; the dense rows belong to the first run."""
    text, rows = Path(settings.text or ""), []
    with gzip.open(text, "rt", encoding="utf-8") as stream:
        written = stream.read(200_000)
    prose = (Path(__file__).read_text()[:3000] + written).splitlines()
    lines = [*PROBES, *filter(str.strip, prose)][:200]
    for folder in settings.runs:
        finished = FinishedRun(folder)
        load = dotmoe.LoadConfig(device="cpu", dtype="float32")
        dense = load_dense(finished.model, load)
        rows_BT = torch.tensor(dense.tokenizer(written).input_ids[:2048]).view(4, 512)
        expected = {"gguf_dense": scores(transformers_logits(dense.model), rows_BT)}
        weights = load_described(finished.described(), load)
        with masked_by(weights, finished.layout):
            expected["gguf"] = scores(transformers_logits(weights.model), rows_BT)
        for kind in settings.types:
            plain = scratch / f"gguf_dense-{kind}" / f"model-{kind}.gguf"
            for name in ("gguf",) if plain.exists() else ("gguf_dense", "gguf"):
                place = scratch / folder.name if name == "gguf" else scratch
                file = exported(folder, place, name, kind, *FEW_TOKENS)
                with LlamaCppModel(file, context=512) as model:
                    mine, top = scores(model.logits, rows_BT)
                    same = [model.tokenize(x) == dense.tokenizer(x).input_ids for x in lines]
                row = {
                    **{"model": name, "type": kind, "experts": finished.layout.num_experts},
                    "active": finished.layout.active_experts,
                    "weights": "repaired" if finished.has_own_weights else "frozen",
                    "bytes": file.stat().st_size,
                    "perplexity": float(mine.mean().exp()),
                    "in_transformers": float(expected[name][0].mean().exp()),
                    "top1_agreement": float((top == expected[name][1]).double().mean()),
                    "equal_lines": [sum(same), len(lines)],
                    "answer": chatted(file),
                }
                if name == "gguf":
                    pair = replace(BENCH, dense=str(plain), moe=str(file))
                    (row["decode"],) = bench(pair)["points"]
                rows.append(row)
                print(json.dumps(row), flush=True)
                keep(settings.out, {"text": text.name, "tokens": rows_BT.numel(), "rows": rows})


def scores(logits: Logits, rows_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats of every token except a row's first, and the most likely tokens."""
    found = [logits(row) for row in rows_BT]
    nats = [cross_entropy(x[:-1], row[1:]) for x, row in zip(found, rows_BT, strict=True)]
    return torch.stack(nats).double(), torch.cat([x.argmax(-1) for x in found])


def chatted(file: Path) -> str:
    """The file's answer to a question, with its own chat template."""
    model = importlib.import_module("llama_cpp").Llama(str(file), n_ctx=256, verbose=False)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    answer = model.create_chat_completion(asked, max_tokens=24, temperature=0.0)
    return str(answer["choices"][0]["message"]["content"])


def exported(made: Path, out: Path, name: str, kind: str, *options: str) -> Path:
    """Path of the GGUF file of a run."""
    out = out / f"{name}-{kind}"
    line = ["export", str(made), str(out), "--format", name, "--gguf-type", kind, *options]
    assert run(line) == 0
    return out / f"model-{kind}.gguf"


def in_llama_cpp(made: Path, scratch: Path, name: str, kind: str, context: int) -> LlamaCppModel:
    """A run, exported to a GGUF and loaded."""
    return LlamaCppModel(exported(made, scratch, name, kind), context=context + 1)


def mean_of(nats: Callable[[Tensor], Tensor], rows_BT: Tensor) -> float:
    """Perplexity per token over windows."""
    return float(nats(rows_BT).mean().exp())


def transformers_logits(model: Any) -> Logits:
    """Logits function of a Transformers model."""

    @torch.no_grad()
    def logits(tokens_T: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens_T[None].long(), use_cache=False).logits[0]
        return found

    return logits


def looked_at(logits: Logits, rows_BT: Tensor, new_tokens: int) -> dict[str, Any]:
    """Logits of the first rows, and the greedy continuation of their first tokens."""
    rows = rows_BT[:PROMPTS]
    greedy = []
    for row in rows:
        tokens = row[:PROMPT_TOKENS]
        for _ in range(min(new_tokens, rows_BT.shape[1] - PROMPT_TOKENS)):
            tokens = torch.cat([tokens, logits(tokens)[-1].argmax()[None].to(tokens.dtype)])
        greedy.append(tokens[PROMPT_TOKENS:].tolist())
    return {"logits": torch.stack([logits(row) for row in rows]), "greedy": greedy}


def parity(mine: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Logit errors in standard deviations of the reference, and equal tokens of greedy text."""
    found, expected = mine["logits"], reference["logits"]
    error = (found - expected).abs().mean(dim=-1) / expected.std()
    return {
        "tokens": error.numel(),
        "mean_error": float(error.mean()),
        "median_error": float(error.median()),
        "largest_error": float(error.max()),
        "top1_agreement": float((found.argmax(-1) == expected.argmax(-1)).double().mean()),
        "equal_greedy_tokens": [
            next((n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
            for one, other in zip(mine["greedy"], reference["greedy"], strict=True)
        ],
    }


if __name__ == "__main__":
    main()
