"""GGUF files of finished runs in llama.cpp against Transformers, by number format.

    python benchmarks/gguf_parity.py FROZEN REPAIRED --text wiki.test.raw.txt.gz --out FILE

Measures perplexity on a text, the most likely tokens, tokenisation, size, an answer by the file's
own chat template, and decode speed beside the dense model's file. Runs are of one dense model.
Needs `pip install -e '.[llama-cpp]'`.
"""

import gzip
import importlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor
from torch.nn.functional import cross_entropy
from tyro.conf import Positional

import dotmoe
from dotmoe.cli import run
from dotmoe.export.llama_cpp import LlamaCppModel
from dotmoe.measure.bench import BenchConfig, bench
from dotmoe.method.masked import masked_by
from dotmoe.models.load import load_dense, load_described
from dotmoe.models.tokenizer import PROBES
from dotmoe.run.finished import FinishedRun
from rounds import keep

BENCH = BenchConfig(dense="", moe="", batch_sizes=(1,), prompt_tokens=0, threads=1, clock="cpu")
FEW_TOKENS = ("--scale-tokens", "64", "--verify-tokens", "64")
TOKENS = (4, 512)
"""Rows and columns of the tokens to score."""
Logits = Callable[[Tensor], Tensor]
"""Token ids [T] -> logits [T, V]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Which runs and number formats to compare, and on what text."""

    runs: Positional[tuple[Path, ...]]
    """Finished runs of one model."""
    text: Path
    """Text file, compressed as .gz."""
    types: tuple[str, ...] = ("f32", "f16", "bf16", "q8_0", "q4_0")
    out: Path


def main() -> None:
    """One row per file, written at once; the dense rows belong to the first run."""
    settings, rows = tyro.cli(Settings, description=__doc__), list[dict[str, Any]]()
    torch.set_num_threads(1)
    with gzip.open(settings.text, "rt", encoding="utf-8") as stream:
        written = stream.read(200_000)
    prose = (Path(__file__).read_text()[:3000] + written).splitlines()
    lines = [*PROBES, *filter(str.strip, prose)][:200]
    with tempfile.TemporaryDirectory() as scratch:
        for run in settings.runs:
            for row in rows_of(FinishedRun(run), settings, Path(scratch), written, lines):
                rows.append(row)
                print(json.dumps(row), flush=True)
                tokens = {"text": settings.text.name, "tokens": TOKENS[0] * TOKENS[1]}
                keep(settings.out, {**tokens, "rows": rows})


def rows_of(
    run: FinishedRun, settings: Settings, scratch: Path, written: str, lines: list[str]
) -> Iterator[dict[str, Any]]:
    """Rows of a run's files, and those of the dense model if `scratch` has none yet."""
    load = dotmoe.LoadConfig(device="cpu", dtype="float32")
    dense = load_dense(run.model, load)
    tokens = dense.tokenizer(written).input_ids[: TOKENS[0] * TOKENS[1]]
    rows_BT = torch.tensor(tokens).view(TOKENS)
    expected = {"gguf_dense": scores(transformers_logits(dense.model), rows_BT)}
    weights = load_described(run.described(), load)
    with masked_by(weights, run.layout):
        expected["gguf"] = scores(transformers_logits(weights.model), rows_BT)
    for kind in settings.types:
        plain = scratch / f"gguf_dense-{kind}" / f"model-{kind}.gguf"
        for name in ("gguf",) if plain.exists() else ("gguf_dense", "gguf"):
            place = scratch / run.folder.path.name if name == "gguf" else scratch
            file = exported(run.folder.path, place, name, kind)
            with LlamaCppModel(file, context=512) as model:
                mine, top = scores(model.logits, rows_BT)
                same = [model.tokenize(x) == dense.tokenizer(x).input_ids for x in lines]
            row = {
                **{"model": name, "type": kind, "experts": run.layout.num_experts},
                "active": run.layout.active_experts,
                "weights": "repaired" if run.has_own_weights else "frozen",
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
            yield row


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


def exported(made: Path, out: Path, name: str, kind: str) -> Path:
    """Path of the GGUF file of a run."""
    out = out / f"{name}-{kind}"
    line = ["export", str(made), str(out), "--format", name, "--gguf-type", kind, *FEW_TOKENS]
    assert run(line) == 0
    return out / f"model-{kind}.gguf"


def transformers_logits(model: Any) -> Logits:
    """Logits function of a Transformers model."""

    @torch.no_grad()
    def logits(tokens_T: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens_T[None].long(), use_cache=False).logits[0]
        return found

    return logits


if __name__ == "__main__":
    main()
