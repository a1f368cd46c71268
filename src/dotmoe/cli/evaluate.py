"""`dotmoe evaluate MODEL`: perplexity, or whatever else is asked for, as JSON and as a table."""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from dotmoe.cli.parse import parse
from dotmoe.curve import active_experts_curve
from dotmoe.errors import UserError
from dotmoe.measure import (
    MeasureConfig,
    gguf_file,
    measure_both,
    measure_fidelity,
    measure_generation,
    measure_tasks,
    measure_words,
    model_folder,
)
from dotmoe.measure.tables import (
    fidelity_table,
    notes_of,
    repetition_table,
    samples_text,
    tasks_table,
    word_table,
)
from dotmoe.narration import Narrator, Update
from dotmoe.report import curve_table, draw_curve, require_drawable
from dotmoe.run_folder import write_json


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateCommand(MeasureConfig):
    """What to measure: perplexity of --text, unless --tasks, --word-perplexity, --fidelity,
    --generate or --curve asks for something else.
    """

    curve: tuple[int, ...] | None = None
    """Measure an export at these k, and at k = E; without numbers at a ladder of them."""
    plot: str | None = None
    """Draw the curve into this file: .svg, .png or .pdf."""


def run(arguments: Sequence[str]) -> None:
    """Print what was measured: JSON to standard output, tables to standard error."""
    command = parse(EvaluateCommand, "evaluate", arguments)
    asked = _asked(command)
    if command.plot is not None and asked != "curve":
        raise UserError("--plot draws a curve, and --curve is not given. Give both.")
    said = shlex.join(["dotmoe", "evaluate", *arguments])
    result = _MEASUREMENTS[asked](command) | ({} if asked == "perplexity" else {"command": said})
    if command.out is not None:
        out = Path(command.out)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / f"{asked}.json", result)
    print(json.dumps(result, indent=2))


def _asked(command: EvaluateCommand) -> str:
    """Which one measurement is asked for."""
    given = {
        "tasks": (bool(command.benchmark.tasks), "--tasks"),
        "word_perplexity": (command.word_perplexity is not None, "--word-perplexity"),
        "fidelity": (command.fidelity, "--fidelity"),
        "generation": (command.generation.generate is not None, "--generate"),
        "curve": (command.curve is not None, "--curve"),
    }
    chosen = [name for name, (is_given, _) in given.items() if is_given]
    if len(chosen) > 1:
        options = " and ".join(given[name][1] for name in chosen)
        raise UserError(f"{options} ask for two measurements. Give one of them at a time.")
    return chosen[0] if chosen else "perplexity"


def _perplexity(command: EvaluateCommand) -> dict[str, Any]:
    with Narrator().bar("evaluate") as update:
        results = measure_both(command, update)
    if "against" not in results:
        return results["model"].as_dict()
    return {label: result.as_dict() for label, result in results.items()}


def _tasks(command: EvaluateCommand) -> dict[str, Any]:
    narrator = Narrator()
    result = measure_tasks(command, narrator.say)
    _show(tasks_table(result, command.benchmark.tasks), *notes_of(result))
    return result


def _words(command: EvaluateCommand) -> dict[str, Any]:
    result = _with_bar(measure_words, command)
    _show(word_table(result))
    return result


def _fidelity(command: EvaluateCommand) -> dict[str, Any]:
    result = _with_bar(measure_fidelity, command)
    _show(fidelity_table(result))
    return result


def _generation(command: EvaluateCommand) -> dict[str, Any]:
    result = _with_bar(measure_generation, command)
    _show(samples_text(result), repetition_table(result))
    return result


def _curve(command: EvaluateCommand) -> dict[str, Any]:
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
        curve = active_experts_curve(
            folder, command.evaluate, command.curve or (), command.load, update
        )
    _show(curve_table(curve))
    if plot is not None:
        draw_curve(curve, plot)
    return curve


def _with_bar(
    measurement: Callable[[MeasureConfig, Update], dict[str, Any]], command: EvaluateCommand
) -> dict[str, Any]:
    with Narrator().bar("evaluate") as update:
        return measurement(command, update)


def _show(*parts: Any) -> None:
    console = Console(stderr=True, highlight=False)
    for part in parts:
        console.print(part, markup=not isinstance(part, str), soft_wrap=True)


_MEASUREMENTS: dict[str, Callable[[EvaluateCommand], dict[str, Any]]] = {
    "perplexity": _perplexity,
    "tasks": _tasks,
    "word_perplexity": _words,
    "fidelity": _fidelity,
    "generation": _generation,
    "curve": _curve,
}
