"""`dotmoe evaluate MODEL`: perplexity, or whatever else is asked for, as JSON and as a table."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dotmoe.cli.evaluate_tables import (
    fidelity_table,
    notes_of,
    perplexity_table,
    repetition_table,
    samples_text,
    tasks_table,
    word_table,
)
from dotmoe.cli.parse import parse
from dotmoe.evaluate import EvaluateConfig, evaluate
from dotmoe.progress import Progress
from dotmoe.report import curve_table, draw_curve, require_drawable


def run(arguments: Sequence[str]) -> None:
    """Print what was measured: JSON to standard output, tables to standard error."""
    config = parse(EvaluateConfig, "evaluate", arguments)
    config.check_together()
    if config.plot is not None:
        require_drawable(Path(config.plot))
    result = evaluate(config, Progress(), shlex.join(["dotmoe", "evaluate", *arguments]))
    console = Console(stderr=True, highlight=False)
    for part in _shown(config, result):
        console.print(part, markup=not isinstance(part, str), soft_wrap=True)
    if config.plot is not None:
        draw_curve(result, Path(config.plot))
    print(json.dumps(result, indent=2))


def _shown(config: EvaluateConfig, result: dict[str, Any]) -> list[Any]:
    """Tables and lines that say what was measured."""
    match config.measurement:
        case "tasks":
            return [tasks_table(result, config.benchmark.tasks), *notes_of(result)]
        case "word_perplexity":
            return [word_table(result)]
        case "fidelity":
            return [fidelity_table(result)]
        case "generation":
            return [samples_text(result), repetition_table(result)]
        case "curve":
            return [curve_table(result)]
    return [perplexity_table(result)]
