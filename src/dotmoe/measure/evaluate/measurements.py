"""The measurements by name, and `evaluate`, which makes those that a config selects."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from dotmoe.common.errors import UserError
from dotmoe.common.files import Values, alone_in, read_json, write_json
from dotmoe.common.options import checked
from dotmoe.common.progress import Progress
from dotmoe.common.tables import Table
from dotmoe.measure.config import EvaluateConfig
from dotmoe.measure.evaluate import fidelity, generation, perplexity, task_tables, tasks
from dotmoe.measure.evaluate.models import gguf_file, model_folder, sides_of
from dotmoe.models.identity import FINGERPRINT, fingerprint
from dotmoe.run.provenance import provenance

Measure = Callable[[EvaluateConfig, Progress], Values]
Show = Callable[[Values], list[Table | str]]
MEASUREMENTS: dict[str, tuple[Measure, Show]] = {
    "perplexity": (
        perplexity.measure_perplexity,
        lambda result: [perplexity.perplexity_table({s["name"]: s for s in sides_of(result)})],
    ),
    "tasks": (tasks.measure_tasks, task_tables.shown_tasks),
    "fidelity": (fidelity.measure_fidelity, lambda result: [fidelity.fidelity_table(result)]),
    "generation": (generation.measure_generation, generation.shown_texts),
    "curve": (perplexity.measure_curve, lambda result: [perplexity.curve_table(result)]),
}
"""The function that measures and the one that shows the result, by the result file's name."""


def evaluate(config: EvaluateConfig, progress: Progress | None = None) -> dict[str, Values]:
    """Measure what `config` selects, by name.

    Each result is also written to `config.out`/NAME.json if `out` is given. Raises `UserError` if
    options are out of range, or the model or text is missing, or they do not fit each other, or
    another process writes to `out`, or `out` has a result of another model.
    """
    config = checked(config)
    results = dict[str, Values]()
    with nullcontext() if config.out is None else alone_in(Path(config.out)):
        _require_results_of(config)
        for name in config.measurements:
            measure, _ = MEASUREMENTS[name]
            results[name] = {
                "origin": "measured",
                "name": config.model,
                **measure(config, progress or Progress(quiet=True)),
                "provenance": provenance(0, config.load.device),
            }
            if config.out is not None:
                write_json(Path(config.out) / f"{name}.json", results[name])
    return results


def _require_results_of(config: EvaluateConfig) -> None:
    """Refuse a folder with results of another model, which would be overwritten."""
    if config.out is None:
        return
    for name in config.measurements:
        path = Path(config.out) / f"{name}.json"
        if name == "tasks" or not path.is_file():  # tasks have a check of their own
            continue
        found = read_json(path)
        if not _is_of(found, config.model):
            raise UserError(
                f"{path} is a result of {found.get('name')}, another model, and would be "
                "overwritten. Name another folder with --out, or delete the file."
            )


def _is_of(result: Values, model: str) -> bool:
    """Whether a result is of this model, by its name or by its weights."""
    if result.get("name") == model:
        return True
    side = result.get("model")
    known = (side if isinstance(side, dict) else result).get(FINGERPRINT)
    if known is None:  # results of other versions lack it
        return True
    if gguf_file(Path(model)):
        return False
    return bool(known == fingerprint(model_folder(model)))
