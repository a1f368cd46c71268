"""`dotmoe evaluate MODEL --text FILE`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from dotmoe.cli.parse import parse
from dotmoe.curve import active_experts_curve
from dotmoe.errors import UserError
from dotmoe.measure import MeasureConfig, gguf_file, measure, model_folder
from dotmoe.narration import Narrator
from dotmoe.report import curve_table, draw_curve, require_drawable


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateCommand(MeasureConfig):
    """What to measure."""

    curve: tuple[int, ...] | None = None
    """Measure an export at these k, and at k = E; without numbers at a ladder of them."""
    plot: str | None = None
    """Draw the curve into this file: .svg, .png or .pdf."""


def run(arguments: Sequence[str]) -> None:
    """Print the perplexity, or the curve, as JSON."""
    command = parse(EvaluateCommand, "evaluate", arguments)
    if command.curve is None and command.plot is not None:
        raise UserError("--plot draws a curve, and --curve is not given. Give both.")
    if command.curve is not None:
        _curve(command, command.curve)
        return
    with Narrator().bar("evaluate") as update:
        result = measure(command, update)
    print(json.dumps(result.as_dict(), indent=2))


def _curve(command: EvaluateCommand, active_experts: tuple[int, ...]) -> None:
    if gguf_file(Path(command.model)) is not None:
        raise UserError(
            f"{command.model} is a GGUF, whose curve is not measured: it is that of the export in "
            "glm4_moe from the same run. Name that one."
        )
    plot = None if command.plot is None else Path(command.plot)
    if plot is not None:
        require_drawable(plot)
    folder = model_folder(command.model)
    with Narrator().bar("evaluate") as update:
        curve = active_experts_curve(folder, command.evaluate, active_experts, command.load, update)
    print(json.dumps(curve, indent=2))
    Console(stderr=True).print(curve_table(curve))
    if plot is not None:
        draw_curve(curve, plot)
