"""GGUF files in llama.cpp beside Transformers: logits, greedy text, perplexity by number format.

Every model is converted without training (`--steps 0`) and written in each GGUF format:

    python benchmarks/gguf_parity.py
    python benchmarks/gguf_parity.py --model path/to/stories260K --text path/to/text.txt

Results are printed and kept in results/gguf_parity.json. Needs `pip install 'dotmoe[llama-cpp]'`.
"""

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

import dotmoe
from dotmoe.cli import run
from dotmoe.evaluate import stock_nats
from dotmoe.evaluate.scoring import row_nats
from dotmoe.files import read_json
from dotmoe.granularity import ExpertsConfig
from dotmoe.llama_cpp import LlamaCppModel
from dotmoe.load import load_dense
from dotmoe.moe.masked import masked_by
from rounds import keep

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
NEW_TOKENS = 200
PROMPT_TOKENS = 32
PROMPTS = 3
PERPLEXITY_TOKENS = 8192
Logits = Callable[[Tensor], Tensor]
"""Token ids [T] -> logits [T, V]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Which model."""

    model: str = "embedded"
    """`embedded`, or the folder of a dense model."""
    text: str | None = None
    """Text for another model than `embedded`."""
    experts: int | None = None
    """Experts a layer; the recipe's if left out."""
    types: tuple[str, ...] = TYPES
    new_tokens: int = NEW_TOKENS
    out: Path = Path("results/gguf_parity.json")


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        found = measured(settings, Path(scratch))
    before = read_json(settings.out) if settings.out.exists() else {}
    keep(settings.out, before | {Path(settings.model).name: found})


def measured(settings: Settings, scratch: Path) -> dict[str, Any]:
    """All figures of one model."""
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


def in_llama_cpp(made: Path, scratch: Path, name: str, kind: str, context: int) -> LlamaCppModel:
    """A run, exported to a GGUF and loaded."""
    out = scratch / f"{name}-{kind}"
    assert run(["export", str(made), str(out), "--format", name, "--gguf-type", kind]) == 0
    return LlamaCppModel(out / f"model-{kind}.gguf", context=context + 1)


def mean_of(nats: Callable[[Tensor], Tensor], rows_BT: Tensor) -> float:
    """Perplexity a token over windows."""
    return float(nats(rows_BT).mean().exp())


def transformers_logits(model: Any) -> Logits:
    """Of a model of Transformers."""

    @torch.no_grad()
    def logits(tokens_T: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens_T[None].long(), use_cache=False).logits[0]
        return found

    return logits


def looked_at(logits: Logits, rows_BT: Tensor, new_tokens: int) -> dict[str, Any]:
    """Logits of the first rows, and the most likely continuation of their first tokens."""
    rows = rows_BT[:PROMPTS]
    greedy = []
    for row in rows:
        tokens = row[:PROMPT_TOKENS]
        for _ in range(min(new_tokens, rows_BT.shape[1] - PROMPT_TOKENS)):
            tokens = torch.cat([tokens, logits(tokens)[-1].argmax()[None].to(tokens.dtype)])
        greedy.append(tokens[PROMPT_TOKENS:].tolist())
    return {"logits": torch.stack([logits(row) for row in rows]), "greedy": greedy}


def parity(mine: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Errors in standard deviations of the reference's logits, and equal tokens of greedy text."""
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
