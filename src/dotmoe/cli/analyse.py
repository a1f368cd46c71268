"""`dotmoe analyse RUN`: what became of the experts, as result files and in a few lines."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dotmoe.analyse import AnalyseConfig, analyse
from dotmoe.analysis.headlines import headlines
from dotmoe.cli.parse import parse
from dotmoe.narration import Narrator


def run(arguments: Sequence[str]) -> None:
    """Make the analyses and say of each what it found and where it is."""
    config = parse(AnalyseConfig, "analyse", arguments)
    results = analyse(config, Narrator())
    console = Console(highlight=False)
    for name, result in results.items():
        console.print(f"{name}: {Path(config.run)}/6_evaluate/analysis/{name}.json", soft_wrap=True)
        for line in headlines(name, result["values"]):
            console.print(f"  {line}", soft_wrap=True, markup=False)
