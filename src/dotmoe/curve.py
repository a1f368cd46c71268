"""What another k does to the quality of an export: one checkpoint, loaded once, at several k."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from transformers import AutoTokenizer

from dotmoe.device import resolved_device
from dotmoe.errors import UserError
from dotmoe.evaluate import EvaluateConfig, PerplexityResult, ladder, perplexity_by_active_experts
from dotmoe.evaluate.checkpoint import stock_model
from dotmoe.evaluate.perplexity import packed_text
from dotmoe.export import OUTPUTS, ExportRecord, output_named, require_free_k
from dotmoe.export.stock_moe import StockMoe
from dotmoe.load import LoadConfig, resolved_dtype
from dotmoe.narration import Update
from dotmoe.run_folder import provenance


def active_experts_curve(
    folder: Path,
    config: EvaluateConfig,
    active_experts: tuple[int, ...],
    load: LoadConfig,
    on_progress: Update,
) -> dict[str, Any]:
    """Perplexity of an export on `config.text` at several k, and what each k activates.

    k = E is always among them: the same computation as the dense model's.

    Args:
        folder: An export whose k is free.
        config: Text, window and batch size.
        active_experts: Values of k; none: `ladder`.
        load: Device and number format.
        on_progress: Moves a bar.

    Returns:
        Plain values for JSON, with provenance.

    Raises:
        UserError: No such export, its k is fixed, a k out of range, or no text.
    """
    record = ExportRecord.load(folder)
    _require_free(folder, record, active_experts)
    if not config.text:
        raise UserError("--text names no file. Give a text to measure perplexity on.")
    chosen = active_experts or ladder(record.num_experts, record.active_experts)
    device = resolved_device(load.device)
    model = stock_model(folder, device, resolved_dtype(load.dtype, device))
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    packed = packed_text(config, tokenizer)
    output = cast(StockMoe, output_named(record.format))
    layers = range(record.first_dense_layers, record.num_layers)
    results = perplexity_by_active_experts(
        model,
        tokenizer,
        packed,
        config,
        sorted({*chosen, record.num_experts}),
        lambda active: output.run_active_experts(model, layers, active),
        on_progress,
    )
    return _as_values(record, results, str(model.dtype).removeprefix("torch."))


def _require_free(folder: Path, record: ExportRecord, active_experts: tuple[int, ...]) -> None:
    if not record.active_experts_editable:
        free = [name for name, output in OUTPUTS.items() if output.active_experts_editable]
        raise UserError(
            f"{folder} is a {record.format}, whose k is fixed at {record.active_experts}, so it "
            f"has no curve. Export the run as {' or '.join(free)}."
        )
    for active in active_experts:
        require_free_k(folder, record, active)


def _as_values(
    record: ExportRecord, results: dict[int, PerplexityResult], dtype: str
) -> dict[str, Any]:
    dense = results[record.num_experts]
    return {
        "origin": "measured",
        "name": record.name,
        "format": record.format,
        "source": record.source,
        "dtype": dtype,
        "num_experts": record.num_experts,
        "active_experts": record.active_experts,
        "dense_parameters": record.parameters["dense"],
        "dense": {"active_experts": record.num_experts, "perplexity": dense.perplexity},
        "points": [_point(record, result, dense, active) for active, result in results.items()],
        "text": list(dense.text),
        "window": dense.window,
        "tokens": dense.tokens,
        "unit": dense.unit,
        "protocol": dense.protocol,
        "provenance": provenance(seed=0),
    }


def _point(
    record: ExportRecord, result: PerplexityResult, dense: PerplexityResult, active_experts: int
) -> dict[str, Any]:
    changed = record.with_active_experts(active_experts)
    figures = asdict(result)
    return {
        "active_experts": active_experts,
        "active_fraction": changed.active_fraction,
        "active_parameters": changed.parameters["active"],
        "active_parameters_with_routers": changed.parameters["active_with_routers"],
        **{name: figures[name] for name in ("loss", "perplexity", "bits_per_byte")},
        "loss_above_dense": result.loss - dense.loss,
    }
