"""What another k does to the quality of an export: one checkpoint, loaded once, at several k."""

from typing import Any

from dotmoe.errors import UserError
from dotmoe.evaluate.config import EvaluateConfig
from dotmoe.evaluate.models import loaded, model_folder, stock_nats
from dotmoe.evaluate.perplexity import packed_text, perplexity
from dotmoe.export import FORMATS, ExportRecord, require_free_k
from dotmoe.progress import Progress

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


def measure_curve(config: EvaluateConfig, progress: Progress) -> dict[str, Any]:
    """Perplexity of an export on `config.corpus` at several k, and what each k activates.

    k = E is always among them: the computation of the weights that were split. Those are the dense
    model's, unless they were finetuned, which `all_experts.model` says. Where `config.curve` is
    empty the others are those of `ladder`.

    Raises:
        UserError: No such export, its k is fixed, or a k out of range.
    """
    folder, corpus = model_folder(config.model), config.corpus
    record = ExportRecord.load(folder)
    if not record.active_experts_editable:
        free = [name for name, output in FORMATS.items() if output.active_experts_editable]
        raise UserError(
            f"{folder} is a {record.format}, whose k is fixed at {record.active_experts}, so it "
            f"has no curve. Export the run as {' or '.join(free)}."
        )
    for active in config.curve or ():
        require_free_k(folder, record, active)
    chosen = config.curve or ladder(record.num_experts, record.active_experts)
    ks = sorted({*chosen, record.num_experts})
    stock = loaded(folder, config.load)
    text, window = packed_text(corpus, stock.tokenizer), corpus.window_in(stock.context)
    layers = range(record.first_dense_layers, record.num_layers)
    nats, results = stock_nats(stock.model), list[dict[str, Any]]()
    with progress.bar("evaluate", tokens=1) as bar:

        def update(done: int, total: int, note: str = "") -> None:
            bar(len(results) * total + done, len(ks) * total, note)

        for active in ks:
            FORMATS[record.format].run_active_experts(stock.model, layers, active)
            results.append(perplexity(nats, text, window, corpus.windows_at_once, update))
    last, points = results[-1], []
    for active, result in zip(ks, results, strict=True):
        changed = record.with_active_experts(active)
        point = {
            "active_experts": active,
            "active_fraction": changed.active_fraction,
            "active_parameters": changed.parameters["active"],
            "active_parameters_with_routers": changed.parameters["active_with_routers"],
            **{name: result[name] for name in ("loss", "perplexity", "bits_per_byte")},
            "loss_above_all_experts": result["loss"] - last["loss"],
        }
        points.append(point)
    all_experts = "other weights" if record.is_finetuned or record.dropped_size else "dense"
    return {
        **{name: getattr(record, name) for name in ("name", "format", "source")},
        "dtype": stock.dtype,
        "num_experts": record.num_experts,
        "active_experts": record.active_experts,
        "dense_parameters": record.parameters["dense"],
        "all_experts": {"model": all_experts, "perplexity": last["perplexity"]},
        "points": points,
        **{name: last[name] for name in ("text", "window", "tokens", "unit", "protocol")},
    }
