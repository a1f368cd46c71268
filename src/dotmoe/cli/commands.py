"""The commands: each makes its config of the line, calls one function, and prints the result."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from tyro.conf import Positional

from dotmoe import bench, sweep
from dotmoe.analyse import AnalyseConfig, analyse
from dotmoe.cli.parse import Line
from dotmoe.compare import CompareConfig, compare, table
from dotmoe.config import FinetuneRunConfig, RunConfig
from dotmoe.errors import UserError
from dotmoe.evaluate import EvaluateConfig, evaluate, gguf_file
from dotmoe.export import explained, set_active_experts
from dotmoe.inspection import InspectConfig, inspect_model, render, stored_dtype
from dotmoe.load import dense_config
from dotmoe.options import at_least
from dotmoe.pipeline import Conversion, convert, finetune
from dotmoe.progress import Progress
from dotmoe.quickstart import QuickstartConfig, quickstart
from dotmoe.reexport import ReexportConfig, reexport
from dotmoe.report import page, plots
from dotmoe.run_folder import export_folder
from dotmoe.tables import Table, to_rich

_GGUF = (
    "gguf: for llama.cpp, as gguf_glm4moe (gates exactly 1) or gguf_llama, whichever holds the "
    "model; k can be edited; gguf_dense: the dense model, to compare with."
)


def _show(*parts: Any, to_stderr: bool = False) -> None:
    """Print text as it is, tables with frames, and in a file or pipe as wide as they are."""
    console = Console(stderr=to_stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 1_000  # more than a table needs
    for part in parts:
        console.print(part)


def run_quickstart(line: Line) -> None:
    """`dotmoe quickstart`."""
    _show(page.quickstart_summary(quickstart(line.config(QuickstartConfig), Progress())))


def run_inspect(line: Line) -> None:
    """`dotmoe inspect MODEL`."""
    asked = line.config(InspectConfig)
    config, folder = dense_config(asked.model)
    found = inspect_model(config, asked, stored=stored_dtype(config, folder))
    if asked.json:
        print(json.dumps({"model": asked.model, **found}, indent=2))
    else:
        _show(render(found, details=asked.details))


def run_convert(line: Line) -> None:
    """`dotmoe convert MODEL OUT`."""
    _show_summary(convert(line.config(RunConfig), Progress()))


def run_finetune(line: Line) -> None:
    """`dotmoe finetune RUN OUT`."""
    _show_summary(finetune(line.config(FinetuneRunConfig), Progress()))


def _show_summary(made: Conversion) -> None:
    if made.results:  # rank zero's alone
        _show(page.summary(made.folder))


def run_compare(line: Line) -> None:
    """`dotmoe compare MODEL OUT`."""
    config = line.config(CompareConfig)
    summary = compare(config, Progress())
    _show_runs("compare", config.out, summary, [table(summary)])


def run_sweep(line: Line) -> None:
    """`dotmoe sweep MODEL OUT`."""
    config = line.config(sweep.SweepConfig)
    summary = sweep.sweep(config, Progress())
    _show_runs("sweep", config.out, summary, sweep.tables(summary))


def _show_runs(name: str, out: str, summary: dict[str, Any], tables: list[Table]) -> None:
    _show(
        *map(to_rich, tables),
        f"{', '.join(summary['text'])}: {summary['protocol']}",
        f"runs, {name}.json, {name}.md in {out}",
    )


def run_export(line: Line) -> None:
    """`dotmoe export RUN OUT`."""
    config = line.config(ReexportConfig, f"\n\n{explained()}\n\n{_GGUF}")
    with Progress().bar("export") as update:
        record = reexport(config, update)
    split = f"{record.active_experts} of {record.num_experts} experts"
    _show(
        f"{config.out}: {record.format}, {split if record.num_experts else 'dense'}, "
        f"{record.total_bytes:,} bytes in {record.dtype}, verified.",
        *(f"- {note}" for note in record.notes),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EditConfig:
    """What to change of an export; its weights stay as they are."""

    export: Annotated[Positional[str], tyro.conf.arg(metavar="EXPORT")]
    """Exported folder, run folder, or GGUF file."""
    active_experts: Annotated[int, at_least(1)]
    """Experts that are to run per token (k), 1 to E."""


def run_edit(line: Line) -> None:
    """`dotmoe edit EXPORT`."""
    config = line.config(EditConfig)
    path = Path(config.export)
    folder = path.parent if path.suffix == ".gguf" else export_folder(path)
    record = set_active_experts(folder, config.active_experts)
    _show(
        f"{folder}: {record.active_experts} of {record.num_experts} experts run per "
        f"token, {record.parameters['active']:,} parameters active.",
        *(f"- {note}" for note in record.notes),
    )


def run_evaluate(line: Line) -> None:
    """`dotmoe evaluate MODEL`."""
    config = line.config(EvaluateConfig)
    plot = Path(config.plot) if config.plot else None
    if plot:
        plots.require_drawable(plot)
    result = evaluate(config, Progress(), str(line))
    if plot:
        plots.draw_curve(result, plot)
    if config.json:
        print(json.dumps(result, indent=2))
    else:
        _show(page.evaluation(config.measurement, result))


def run_analyse(line: Line) -> None:
    """`dotmoe analyse RUN`."""
    config = line.config(AnalyseConfig)
    for name, result in analyse(config, Progress(), str(line)).items():
        _show(f"{name}: {Path(config.run)}/6_evaluate/analysis/{name}.json")
        _show(*(f"  {said}" for said in result["says"]))


def run_bench(line: Line) -> None:
    """`dotmoe bench DENSE MOE`."""
    config = line.config(bench.BenchConfig)
    dense, moe = (str(gguf_file(Path(name)) or name) for name in (config.dense, config.moe))
    with Progress().bar("bench") as update:
        result = bench.bench(replace(config, dense=dense, moe=moe), update)
    if config.json:
        print(json.dumps(result, indent=2))
    else:
        _show(to_rich(bench.table(result)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportConfig:
    """One page that says what was lost and what was gained."""

    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN")]
    """Folder of a finished `dotmoe convert`, `finetune` or `quickstart`."""
    out: str | None = None
    """Write the page here, and the page alone. Default: `7_report/report.html` of RUN, and every
    plot as SVG and PNG in `7_report/plots`; of a quickstart `report.html` and `plots` in it."""


def run_report(line: Line) -> None:
    """`dotmoe report RUN`."""
    config = line.config(ReportConfig)
    folder, out = Path(config.run), Path(config.out) if config.out else None
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder. Name one that dotmoe convert has written.")
    if not plots.is_installed():
        _show(plots.NO_PLOTS, to_stderr=True)
    if out and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise UserError(f"--out {out} is no file in a folder that exists. Name one, as a.html.")
    drawn = page.default_page(folder).with_name("plots") if not out else None
    print(page.html_report(folder, out, drawn))
