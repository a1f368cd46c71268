"""`dotmoe evaluate MODEL`: perplexity, or whatever else is asked for, as JSON and as a table."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dotmoe.cli.parse import parse
from dotmoe.evaluate import EvaluateConfig, evaluate
from dotmoe.progress import Progress
from dotmoe.report import draw_curve, evaluation, require_drawable


def run(arguments: Sequence[str]) -> None:
    """Print what was measured: JSON to standard output, tables to standard error."""
    config = parse(EvaluateConfig, "evaluate", arguments)
    config.check_together()
    if config.plot is not None:
        require_drawable(Path(config.plot))
    result = evaluate(config, Progress(), shlex.join(["dotmoe", "evaluate", *arguments]))
    Console(stderr=True, highlight=False).print(
        evaluation(config.measurement, result), soft_wrap=True
    )
    if config.plot is not None:
        draw_curve(result, Path(config.plot))
    print(json.dumps(result, indent=2))
