"""`dotmoe analyse RUN`: what became of the experts, as result files and in a few lines."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dotmoe.analyse import ANALYSES, AnalyseConfig, analyse
from dotmoe.cli.parse import parse
from dotmoe.progress import Progress


def run(arguments: Sequence[str]) -> None:
    """Make the analyses and say of each what it found and where it is."""
    config = parse(AnalyseConfig, "analyse", arguments)
    results = analyse(config, Progress(), shlex.join(["dotmoe", "analyse", *arguments]))
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for name, result in results.items():
        console.print(f"{name}: {Path(config.run)}/6_evaluate/analysis/{name}.json")
        for line in ANALYSES[name].says(result["values"]):
            console.print(f"  {line}")
