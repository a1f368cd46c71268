"""GGUF files in llama.cpp beside Transformers: logits, greedy text, perplexity by number format.

Every model is converted without training (`--steps 0`) and written in each GGUF format:

    python benchmarks/gguf_parity.py
    python benchmarks/gguf_parity.py --model stories=path/to/stories260K:path/to/text.txt

Results are printed and kept in results/gguf_parity.json. Needs `pip install 'dotmoe[llama-cpp]'`.
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from dotmoe.config import RunConfig
from dotmoe.data import TokenBlocks
from dotmoe.evaluate.perplexity import Text, perplexity
from dotmoe.evaluate.scoring import TokenNats, row_nats, stock_nats
from dotmoe.export import ExportConfig, GgufConfig, export
from dotmoe.files import read_json, write_json
from dotmoe.granularity import ExpertsConfig
from dotmoe.layout import ExpertLayout
from dotmoe.llama_cpp import LlamaCppModel
from dotmoe.load import LoadConfig, load_dense
from dotmoe.models.dense import DenseModel
from dotmoe.moe.masked import masked_by
from dotmoe.pipeline import convert
from dotmoe.progress import Progress
from dotmoe.provenance import provenance
from dotmoe.recipes import quickstart, small

RESULTS = Path(__file__).resolve().parents[1] / "results" / "gguf_parity.json"
TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
NEW_TOKENS = 200
PROMPT_TOKENS = 32
PROMPTS = 3
PERPLEXITY_TOKENS = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded", help="embedded, or NAME=FOLDER:TEXT")
    parser.add_argument("--experts", type=int, help="experts a layer; the recipe's if left out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name, _, rest = arguments.model.partition("=")
    with tempfile.TemporaryDirectory() as scratch:
        config = run_config(rest, Path(scratch) / "run", arguments.experts)
        result = measured(config, Path(scratch))
    results = read_json(arguments.out) if arguments.out.exists() else {}
    write_json(arguments.out, {**results, name: result | {"provenance": provenance(0)}})


def run_config(source: str, out: Path, experts: int | None) -> RunConfig:
    """A conversion without training; on this machine's standard library if no text is given."""
    if not source:
        config = quickstart()
    else:
        folder, text = source.rsplit(":", 1)
        config = replace(small(), model=folder, data=replace(small().data, data=(text,)))
    if experts is not None:
        config = replace(config, experts=ExpertsConfig(experts=experts, active=0.25))
    return replace(config, out=str(out), align=replace(config.align, steps=0))


def measured(config: RunConfig, scratch: Path) -> dict[str, Any]:
    """All figures of one model."""
    conversion = convert(config, Progress(quiet=True))
    dense = load_dense(config.model, LoadConfig(device="cpu", dtype="float32"))
    layout = ExpertLayout.load(conversion.folder / "3_extract" / "layout.safetensors")
    heldout = TokenBlocks.load(conversion.folder / "0_data" / "heldout.safetensors").tokens_BT
    heldout = heldout[:, : dense.widths.context]
    stock = AutoModelForCausalLM.from_pretrained(conversion.export, dtype=torch.float32).eval()
    result: dict[str, Any] = {
        "origin": "measured",
        "text": [Path(text).name for text in config.eval_text or config.data.data],
        "split": f"E {layout.num_experts}, s {layout.expert_size}, k {layout.active_experts}",
        "formats": {},
    }
    with masked_by(dense, layout):
        reference = parity_reference(dense.model, heldout)
    stock_reference = parity_reference(stock, heldout)
    for name in ("gguf_glm4moe", "gguf_llama"):
        config, gguf = ExportConfig(format=name), GgufConfig(type="f32")
        record = export(dense, layout, scratch / name, config, heldout, gguf=gguf)
        context, routers = record.details["context"], [r.runtimes[0] for r in record.routers]
        figures = {
            "masked_dense_model": parity(scratch / name, context, heldout, reference),
            "glm4_moe_in_transformers": parity(scratch / name, context, heldout, stock_reference),
            "largest_gate_deviation": max(r.largest_gate_deviation for r in routers),
            "largest_misrouted_share": max(r.misrouted for r in routers),
        }
        result["formats"][name] = figures
        print(name, figures)
    result["perplexity"] = perplexities(dense, layout, heldout, scratch)
    return result


def parity_reference(model: Any, heldout: torch.Tensor) -> dict[str, Any]:
    """Logits and greedy text of a Transformers model."""

    @torch.no_grad()
    def last_logits(tokens: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens[None], use_cache=False).logits[0, -1]

    with torch.no_grad():
        logits = model(input_ids=heldout[:PROMPTS].long()).logits
    prompts = [row[:PROMPT_TOKENS].long() for row in heldout[:PROMPTS]]
    return {"logits": logits, "greedy": [greedy(last_logits, prompt) for prompt in prompts]}


def greedy(last_logits: Callable[[torch.Tensor], torch.Tensor], prompt: torch.Tensor) -> list[int]:
    """The most likely continuation; an end of text is no end."""
    tokens = prompt
    for _ in range(NEW_TOKENS):
        tokens = torch.cat([tokens, last_logits(tokens).argmax()[None]])
    return tokens[len(prompt) :].tolist()


def parity(
    folder: Path, context: int, heldout: torch.Tensor, reference: dict[str, Any]
) -> dict[str, Any]:
    """One file in llama.cpp beside a reference; errors in standard deviations of its logits."""
    rows = heldout[:PROMPTS]
    with LlamaCppModel(folder / "model-f32.gguf", context=context) as model:
        logits = torch.stack([model.logits(row) for row in rows])
        texts = [
            greedy(lambda tokens: model.logits(tokens)[-1], row[:PROMPT_TOKENS].long())
            for row in rows
        ]
    expected = reference["logits"]
    error = (logits - expected).abs().mean(dim=-1) / expected.std()
    return {
        "tokens": error.numel(),
        "mean_error": float(error.mean()),
        "median_error": float(error.median()),
        "largest_error": float(error.max()),
        "top1_agreement": float((logits.argmax(-1) == expected.argmax(-1)).double().mean()),
        "equal_greedy_tokens": [
            agreement(ours, theirs) for ours, theirs in zip(texts, reference["greedy"], strict=True)
        ],
        "greedy_tokens": NEW_TOKENS,
    }


def agreement(ours: list[int], theirs: list[int]) -> int:
    """Tokens before the first difference."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            return number
    return len(ours)


def perplexities(
    dense: DenseModel, layout: ExpertLayout, heldout: torch.Tensor, scratch: Path
) -> dict[str, Any]:
    """Perplexity of the dense and the split model in llama.cpp by number format."""
    window = heldout.shape[1]
    tokens = heldout.flatten()[:PERPLEXITY_TOKENS]
    text = Text(tokens=tokens, tokens_per_byte=1.0, names=("held-out text",), joined="Blocks")

    def measured(nats: TokenNats) -> float:
        return perplexity(nats, text, window).perplexity

    stock = stock_nats(dense.model)
    table: dict[str, Any] = {
        "window": window,
        "tokens": len(tokens),
        "transformers": {"dense": {"perplexity": measured(stock)}},
    }
    with masked_by(dense, layout):
        table["transformers"]["moe"] = {"perplexity": measured(stock)}
    for kind in TYPES:
        files = {"dense": scratch / f"dense-{kind}", "moe": scratch / f"moe-{kind}"}
        for name, form in (("dense", "gguf_dense"), ("moe", "gguf")):
            config, gguf = ExportConfig(format=form), GgufConfig(type=kind)
            export(dense, layout, files[name], config, heldout, gguf=gguf)
        table[kind] = {}
        for name, folder in files.items():
            file = folder / f"model-{kind}.gguf"
            with LlamaCppModel(file, context=window) as model:
                found = measured(row_nats(model.logits))
            table[kind][name] = {"perplexity": found, "bytes": file.stat().st_size}
        print(kind, table[kind])
    return table


if __name__ == "__main__":
    main()
