"""The commands: `run_NAME` calls one function and prints the result.

Importing this imports everything, which takes seconds: it comes after a line is parsed.
"""

import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from dotmoe.cli.quickstart import quickstart, shown_quickstart
from dotmoe.common.errors import UserError
from dotmoe.common.files import expanded, write_json
from dotmoe.common.progress import Progress
from dotmoe.common.tables import Table, to_rich
from dotmoe.measure import bench
from dotmoe.measure import config as measuring
from dotmoe.measure.analyse import UTILISATION, analyse
from dotmoe.measure.evaluate import MEASUREMENTS, evaluate
from dotmoe.measure.inspection import plan_of
from dotmoe.measure.inspection.tables import tables_of
from dotmoe.measure.report import page
from dotmoe.pipeline.compare import compare
from dotmoe.pipeline.conversion import Conversion
from dotmoe.pipeline.convert import convert
from dotmoe.pipeline.finetune import finetune
from dotmoe.pipeline.reexport import reexport, said_of_export
from dotmoe.pipeline.rows import said_of_comparison
from dotmoe.run import config as running


class _Output(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # `run` does not count it as a failure; Rich exits with 1


def _show(*parts: Any) -> None:
    """Print text literally and tables with frames, wrapped at words; not in a file or pipe."""
    console = _Output(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 10_000
    for part in parts:
        console.print(part, crop=False)  # a path may be wider than the terminal


def run_quickstart(config: running.QuickstartConfig) -> None:
    _show(shown_quickstart(quickstart(config, Progress())))


def run_inspect(config: measuring.InspectConfig) -> None:
    plan = plan_of(config)
    if config.json:
        print(json.dumps(plan, indent=2))
    else:
        _show(*map(to_rich, tables_of(plan)))


def run_convert(config: running.RunConfig) -> None:
    _show_conversion(convert(config, Progress()))


def run_finetune(config: running.FinetuneRunConfig) -> None:
    _show_conversion(finetune(config, Progress()))


def _show_conversion(conversion: Conversion) -> None:
    if conversion.results:  # on rank zero only
        _show(page.summary(conversion.folder))


def run_compare(config: running.CompareConfig) -> None:
    summary = compare(config, Progress())
    shown, *texts = said_of_comparison(summary, config.out)
    _show(to_rich(shown), *texts)
    if failed := summary["left_out"]:
        raise UserError(
            f"{len(failed)} runs failed: {', '.join(failed)}. The table says why; the others are "
            "kept. Mend the causes and give the same command again, or leave those methods out."
        )


def run_export(config: running.ReexportConfig) -> None:
    with Progress().bar("export") as update:
        record = reexport(config, update)
    _show(*said_of_export(record, config.out))


def run_evaluate(config: measuring.EvaluateConfig) -> None:
    results = evaluate(config, Progress())
    if config.json:
        (first, *others) = results.values()
        print(json.dumps(results if others else first, indent=2))
        return
    for name, result in results.items():
        _, show = MEASUREMENTS[name]
        _show(*(to_rich(part) if isinstance(part, Table) else part for part in show(result)))


def run_analyse(config: measuring.AnalyseConfig) -> None:
    result = analyse(config, Progress())
    _show(f"{Path(config.run)}/6_evaluate/analysis/{UTILISATION}.json")
    _show(*(f"  {sentence}" for sentence in result["says"]))


def run_bench(config: measuring.BenchConfig) -> None:
    with Progress().bar("bench") as update:
        result = bench.bench(config, update)
    if config.out is not None:  # before anything is printed, as the reader may have gone
        write_json(expanded(config.out), result)
    if config.json:
        print(json.dumps(result, indent=2))
    else:
        _show(to_rich(bench.table(result)))


def run_report(config: measuring.ReportConfig) -> None:
    print(page.html_report(Path(config.run)))
