"""Stage evaluate: what a model is worth, measured, with the protocol beside each number."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dotmoe.evaluate.config import EvaluateConfig, TextConfig
from dotmoe.evaluate.curve import measure_curve
from dotmoe.evaluate.fidelity import measure_fidelity
from dotmoe.evaluate.generation import measure_generation
from dotmoe.evaluate.models import gguf_file, stock_nats
from dotmoe.evaluate.perplexity import (
    heldout_perplexity,
    measure_perplexity,
    measure_words,
    packed_text,
    perplexities,
)
from dotmoe.evaluate.tasks import measure_tasks
from dotmoe.files import write_json
from dotmoe.options import check
from dotmoe.progress import Progress
from dotmoe.provenance import provenance

__all__ = [
    "MEASUREMENTS",
    "EvaluateConfig",
    "TextConfig",
    "evaluate",
    "gguf_file",
    "heldout_perplexity",
    "packed_text",
    "perplexities",
    "stock_nats",
]

MEASUREMENTS: dict[str, Callable[[EvaluateConfig, Progress], dict[str, Any]]] = {
    "perplexity": measure_perplexity,
    "tasks": measure_tasks,
    "word_perplexity": measure_words,
    "fidelity": measure_fidelity,
    "generation": measure_generation,
    "curve": measure_curve,
}
"""By name, which is also that of the result file."""


def evaluate(
    config: EvaluateConfig, progress: Progress | None = None, command: str | None = None
) -> dict[str, Any]:
    """Make the one measurement that is asked for.

    `config.plot` is left to the caller. `command` is what was typed, for the record.

    Returns:
        Plain values with `name`, `command` and `provenance`, which also lie in
        `config.out`/NAME.json if a folder was named.

    Raises:
        UserError: Options out of range, no such model or text, or one that does not fit the other.
    """
    check(config)
    result = {
        "origin": "measured",
        "name": config.model,
        **MEASUREMENTS[config.measurement](config, progress or Progress(quiet=True)),
        "command": command,
        "provenance": provenance(config.generation.sampling_seed),
    }
    if config.out is not None:
        out = Path(config.out)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / f"{config.measurement}.json", result)
    return result
