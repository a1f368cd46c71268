"""The commands: each makes its config of the line, calls one function, and prints the result."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from tyro.conf import Positional

from dotmoe import pipeline
from dotmoe.bench import BenchConfig
from dotmoe.cli.parse import Line
from dotmoe.config import FinetuneRunConfig, RunConfig
from dotmoe.errors import UserError
from dotmoe.evaluate import EvaluateConfig, gguf_file
from dotmoe.export import explained, set_active_experts
from dotmoe.granularity import ExpertsConfig
from dotmoe.inspection import ExportDtype, FinetuneSize, Machines, RunSize
from dotmoe.options import at_least
from dotmoe.progress import Progress
from dotmoe.quickstart import QuickstartConfig
from dotmoe.reexport import ReexportConfig
from dotmoe.run_folder import export_folder
from dotmoe.tables import to_rich

__all__ = ["Line", "quiet_libraries"]


def _show(*parts: Any, to_stderr: bool = False) -> None:
    """Print text as it is, tables with frames."""
    console = Console(stderr=to_stderr, highlight=False, markup=False, soft_wrap=True)
    for part in parts:
        console.print(part)


def quickstart(line: Line) -> None:
    """`dotmoe quickstart`."""
    from dotmoe.quickstart import quickstart
    from dotmoe.report import quickstart_summary

    _show(quickstart_summary(quickstart(line.config(QuickstartConfig), Progress())))


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectConfig:
    """What to look at before paying for a conversion."""

    model: Positional[str]
    """Local folder or hub name of the dense model; `embedded` is the bundled one."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    run: RunSize = field(default_factory=RunSize)
    machines: Machines = field(default_factory=Machines)
    finetune: FinetuneSize = field(default_factory=FinetuneSize)
    export_dtype: ExportDtype = "source"
    """Dtype of the exported weights, as for convert; `source` keeps the checkpoint's."""
    details: bool = False
    """List what each size of memory and disk is the sum of, and all ways that were weighed."""
    json: bool = False
    """Print JSON, always with details, instead of tables."""


def inspect(line: Line) -> None:
    """`dotmoe inspect MODEL`."""
    from dotmoe.inspection import inspect_model, render, stored_dtype
    from dotmoe.load import dense_config
    from dotmoe.models.family import family_of

    asked = line.config(InspectConfig)
    config, folder = dense_config(asked.model)
    family = family_of(config)
    inspection = inspect_model(
        config,
        family,
        asked.experts,
        asked.run,
        stored=stored_dtype(config, family, folder),
        export_dtype=asked.export_dtype,
        machines=asked.machines,
        finetune=asked.finetune,
    )
    if asked.json:
        print(json.dumps({"model": asked.model, **inspection.as_dict()}, indent=2))
    else:
        _show(render(inspection, details=asked.details))


def convert(line: Line) -> None:
    """`dotmoe convert MODEL OUT`."""
    _show_run(pipeline.convert(line.config(RunConfig), Progress()))


def finetune(line: Line) -> None:
    """`dotmoe finetune RUN OUT`."""
    _show_run(pipeline.finetune(line.config(FinetuneRunConfig), Progress()))


def _show_run(made: pipeline.Conversion) -> None:
    from dotmoe.report import summary

    if made.results:  # rank zero's alone
        _show(summary(made.folder))


def compare(line: Line) -> None:
    """`dotmoe compare MODEL OUT`."""
    from dotmoe.compare import CompareConfig, compare, table

    config = line.config(CompareConfig)
    summary = compare(config, Progress())
    _show(to_rich(table(summary)))
    _show(f"{', '.join(summary['text'])}: {summary['protocol']}")
    _show(f"runs, compare.json, compare.md in {config.out}")


def sweep(line: Line) -> None:
    """`dotmoe sweep MODEL OUT`."""
    from dotmoe.sweep import SweepConfig, sweep, tables

    config = line.config(SweepConfig)
    summary = sweep(config, Progress())
    _show(*map(to_rich, tables(summary)))
    _show(f"{', '.join(summary['text'])}: {summary['protocol']}")
    _show(f"runs, sweep.json, sweep.md in {config.out}")


_GGUF = (
    "gguf: for llama.cpp, as gguf_glm4moe (gates exactly 1) or gguf_llama, whichever holds the "
    "model; k can be edited; gguf_dense: the dense model, to compare with."
)


def export(line: Line) -> None:
    """`dotmoe export RUN OUT`."""
    from dotmoe.reexport import reexport

    config = line.config(ReexportConfig, f"\n\n{explained()}\n\n{_GGUF}")
    record = reexport(config)
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


def edit(line: Line) -> None:
    """`dotmoe edit EXPORT`."""
    config = line.config(EditConfig)
    path = Path(config.export)
    folder = path.parent if path.suffix == ".gguf" else export_folder(path)
    record = set_active_experts(folder, config.active_experts)
    _show(
        f"{folder}: {record.active_experts} of {record.num_experts} experts run per "
        f"token, {record.parameters['active']:,} parameters active."
    )


def evaluate(line: Line) -> None:
    """`dotmoe evaluate MODEL`: JSON to standard output, tables to standard error."""
    from dotmoe.evaluate import evaluate
    from dotmoe.report import draw_curve, evaluation, require_drawable

    config = line.config(EvaluateConfig)
    if config.plot is not None:
        require_drawable(Path(config.plot))
    result = evaluate(config, Progress(), str(line))
    _show(evaluation(config.measurement, result), to_stderr=True)
    if config.plot is not None:
        draw_curve(result, Path(config.plot))
    print(json.dumps(result, indent=2))


def analyse(line: Line) -> None:
    """`dotmoe analyse RUN`."""
    from dotmoe.analyse import ANALYSES, AnalyseConfig, analyse

    config = line.config(AnalyseConfig)
    for name, result in analyse(config, Progress(), str(line)).items():
        _show(f"{name}: {Path(config.run)}/6_evaluate/analysis/{name}.json")
        _show(*(f"  {said}" for said in ANALYSES[name].says(result["values"])))


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchLine(BenchConfig):
    """Two models, and what to measure on them."""

    json: bool = False
    """Print JSON instead of tables."""


def bench(line: Line) -> None:
    """`dotmoe bench DENSE MOE`."""
    from dotmoe.bench import bench, tables

    config = line.config(BenchLine)
    dense, moe = (str(gguf_file(Path(name)) or name) for name in (config.dense, config.moe))
    config = replace(config, dense=dense, moe=moe)
    with Progress().bar("bench") as update:
        result = bench(config, update)
    if config.json:
        print(json.dumps(result, indent=2))
    else:
        _show(*map(to_rich, tables(result)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportConfig:
    """One page that says what was lost and what was gained."""

    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN")]
    """Folder of a finished `dotmoe convert`, `finetune` or `quickstart`."""
    out: str | None = None
    """Write the page here, and the page alone. Default: `7_report/report.html` of RUN, and every
    plot as SVG and PNG in `7_report/plots`; of a quickstart `report.html` and `plots` in it."""


def report(line: Line) -> None:
    """`dotmoe report RUN`."""
    from dotmoe.report import NO_PLOTS, default_page, html_report, is_installed

    config = line.config(ReportConfig)
    folder = Path(config.run)
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder. Name one that dotmoe convert has written.")
    if not is_installed():
        _show(NO_PLOTS, to_stderr=True)
    page = None if config.out is None else Path(config.out)
    if page is not None and (page.is_dir() or not page.absolute().parent.is_dir()):
        raise UserError(f"--out {page} is no file in a folder that exists. Name one, as a.html.")
    plots = default_page(folder).with_name("plots") if page is None else None
    print(html_report(folder, page, plots))


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Inside, Transformers shows neither bars nor warnings; what matters we say ourselves."""
    from transformers.utils import logging as transformers_logging

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    transformers_logging.disable_progress_bar()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
