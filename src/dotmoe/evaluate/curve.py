"""What another k does to the quality of an export: one checkpoint, loaded once, at several k."""

from pathlib import Path
from typing import Any

from dotmoe.errors import UserError
from dotmoe.evaluate.config import EvaluateConfig, TextConfig
from dotmoe.evaluate.models import gguf_file, loaded, model_folder
from dotmoe.evaluate.perplexity import Perplexity, packed_text, perplexity
from dotmoe.evaluate.scoring import stock_nats
from dotmoe.export import FORMATS, ExportRecord, format_named, require_free_k
from dotmoe.load import LoadConfig
from dotmoe.progress import Progress, Update, no_update

RUNGS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
"""Shares of the experts at which a curve is measured unless told otherwise."""


def ladder(num_experts: int, active_experts: int) -> tuple[int, ...]:
    """Values of k for a curve: some shares of E, the model's own k, and E, ascending.

    Example:
        >>> ladder(48, 10)
        (6, 10, 12, 18, 24, 36, 48)
    """
    rungs = {max(1, round(share * num_experts)) for share in RUNGS}
    return tuple(sorted(rungs | {active_experts}))


def active_experts_curve(
    folder: Path,
    config: TextConfig,
    active_experts: tuple[int, ...],
    load: LoadConfig,
    on_progress: Update = no_update,
) -> dict[str, Any]:
    """Perplexity of an export on `config.text` at several k, and what each k activates.

    k = E is always among them: the computation of the weights that were split. Those are the dense
    model's, unless they were finetuned, which `all_experts.model` says.

    Without `active_experts` those of `ladder` are measured; `on_progress` is told windows done and
    in all, over all k.

    Raises:
        UserError: No such export, its k is fixed, a k out of range, or no text.
    """
    record = ExportRecord.load(folder)
    if not record.active_experts_editable:
        free = [name for name, output in FORMATS.items() if output.active_experts_editable]
        raise UserError(
            f"{folder} is a {record.format}, whose k is fixed at {record.active_experts}, so it "
            f"has no curve. Export the run as {' or '.join(free)}."
        )
    for active in active_experts:
        require_free_k(folder, record, active)
    config.require_text()
    chosen = active_experts or ladder(record.num_experts, record.active_experts)
    ks = sorted({*chosen, record.num_experts})
    stock = loaded(folder, load)
    text = packed_text(config, stock.tokenizer)
    window = config.window_in(stock.context)
    output = format_named(record.format)
    layers = range(record.first_dense_layers, record.num_layers)
    nats, rows = stock_nats(stock.model), config.windows_at_once
    results: dict[int, Perplexity] = {}
    for index, active in enumerate(ks):
        output.run_active_experts(stock.model, layers, active)

        def update(done: int, total: int, note: str = "", before: int = index) -> None:
            on_progress(before * total + done, len(ks) * total, note)

        results[active] = perplexity(nats, text, window, rows, update)
    everything = results[record.num_experts]
    points = []
    for active, result in results.items():
        changed = record.with_active_experts(active)
        point = {
            "active_experts": active,
            "active_fraction": changed.active_fraction,
            "active_parameters": changed.parameters["active"],
            "active_parameters_with_routers": changed.parameters["active_with_routers"],
            "loss": result.loss,
            "perplexity": result.perplexity,
            "bits_per_byte": result.bits_per_byte,
            "loss_above_all_experts": result.loss - everything.loss,
        }
        points.append(point)
    return {
        "name": record.name,
        "format": record.format,
        "source": record.source,
        "dtype": stock.dtype,
        "num_experts": record.num_experts,
        "active_experts": record.active_experts,
        "dense_parameters": record.parameters["dense"],
        "all_experts": {
            "model": "finetuned" if record.is_finetuned else "dense",
            "perplexity": everything.perplexity,
        },
        "points": points,
        "text": list(text.names),
        "window": window,
        "tokens": everything.tokens,
        "unit": everything.unit,
        "protocol": everything.protocol,
    }


def measure_curve(config: EvaluateConfig, progress: Progress) -> dict[str, Any]:
    """`active_experts_curve` of the model that the user names."""
    if gguf_file(Path(config.model)) is not None:
        raise UserError(
            f"{config.model} is a GGUF, whose curve is not measured: it is that of the export in "
            "glm4_moe from the same run. Name that one."
        )
    folder = model_folder(config.model)
    with progress.bar("evaluate") as update:
        return active_experts_curve(folder, config.corpus, config.curve or (), config.load, update)
