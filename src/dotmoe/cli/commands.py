"""The commands: `run_NAME` parses the line into a config, calls one function, prints the result."""

import argparse
import io
import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, replace
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, NamedTuple, TypeVar
from unittest.mock import patch

import docstring_parser
import tyro
from rich.console import Console
from tyro.conf import Positional

from dotmoe.cli import COMMANDS
from dotmoe.cli.quickstart import QuickstartConfig, quickstart
from dotmoe.common.errors import UserError, nearest
from dotmoe.common.files import DamagedError, read_json
from dotmoe.common.options import check, from_values
from dotmoe.common.progress import Progress
from dotmoe.common.tables import Table, to_rich
from dotmoe.export.choice import explained
from dotmoe.measure import bench
from dotmoe.measure.analyse import analyse
from dotmoe.measure.analyse.run import AnalyseConfig
from dotmoe.measure.evaluate import MEASUREMENTS, evaluate
from dotmoe.measure.evaluate.models import EvaluateConfig, gguf_file
from dotmoe.measure.inspection import InspectConfig, inspect_model, stored_dtype
from dotmoe.measure.inspection.tables import render
from dotmoe.measure.report import page, plots
from dotmoe.models.load import dense_config
from dotmoe.pipeline import Conversion, convert, finetune
from dotmoe.pipeline.compare import CompareConfig, compare, table
from dotmoe.pipeline.reexport import ReexportConfig, reexport
from dotmoe.run.config import RECIPES, FinetuneRunConfig, RunConfig, recipe_of

Config = TypeVar("Config")

_HELP_COLUMNS, _ALL_COLUMNS = 100, 10_000
"""Width of help texts; and a width that no error or table exceeds, so that none is wrapped."""
_GGUF = (
    "gguf: for llama.cpp, as gguf_glm4moe (gates exactly 1) or gguf_llama, whichever can "
    "hold the model; k can be edited."
)


_RECIPES = {
    "convert": "Defaults are those of --recipe default, which does not align; paper and those with "
    "a model's name are the paper's settings, small and quickstart align small models. MODEL may "
    "be left out where a recipe or config names it: --recipe llama2_7b OUT.",
    "finetune": "Defaults are those of --recipe default: distillation from the dense model with "
    "fixed routers, as measured on a model of 135M parameters. paper is the paper's training "
    "on 1.2B tokens, sft the same with our gradient of the routers, small is for models of a few "
    "million parameters.",
}
"""What help says of the recipes of each command that has some."""


class Line(NamedTuple):
    """A command line: the name of the command and its arguments."""

    name: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(["dotmoe", self.name, *self.arguments])

    def config(self, cls: type[Config], notes: str = "") -> Config:
        """The arguments as a checked config; `notes` are appended to the help.

        Names of nested fields must differ because prefixes are omitted. Raises SystemExit after
        help; for a wrong argument a UserError, with the nearest option or choice if there is one.
        """
        command, arguments, start = COMMANDS[self.name], list(self.arguments), None
        named: list[str] = []
        if command.recipes:
            start, named, arguments = self._start(command.recipes)
            values = {field.name: getattr(start, field.name) for field in fields(start)}
            if self.name == "compare":  # from the options of its runs
                values["method"] = "dot_moe"
            if self.name == "inspect":
                values["out"] = ""
            start = cls(**values)
            notes = _RECIPES[command.recipes]
        # Where options come first, they may have taken names: then what is named is left out first.
        typed = next((i for i, w in enumerate(arguments) if w[:1] == "-"), len(arguments))
        most = 1 if self.name == "inspect" else 2
        lacking = range(most, -1, -1) if typed == 0 else [max(0, most - typed)]
        wrong = list[UserError]()
        for number in sorted({min(each, len(named)) for each in lacking}, reverse=True):
            try:
                return self._parsed(cls, start, [*named[:number], *arguments], notes)
            except UserError as error:
                wrong.append(error)
        raise wrong[0]

    def _parsed(self, cls: type[Config], start: Any, arguments: list[str], notes: str) -> Config:
        command = COMMANDS[self.name]
        help_option = next((w for w in arguments if w in ("-h", "--help", "--help-all")), None)
        errors, output = io.StringIO(), io.StringIO()
        width = patch.dict(os.environ, COLUMNS=str(_HELP_COLUMNS if help_option else _ALL_COLUMNS))
        texts = patch("docstring_parser.parse_from_object", _attributes_in_one_line)
        try:  # tyro writes plain ASCII to files without an encoding
            with width, texts, redirect_stderr(errors), redirect_stdout(output):
                config: Config = tyro.cli(
                    cls,
                    prog=f"dotmoe {self.name}",
                    description=f"{command.help} {notes}".strip(),
                    args=["--help"] if help_option else arguments,
                    config=(tyro.conf.OmitArgPrefixes,),
                    **({} if start is None else {"default": start}),
                )
        except SystemExit as stop:
            if not help_option:
                line = _in_one_line(errors.getvalue())
                raise UserError(f"{line} See dotmoe {self.name} --help.") from stop
            # tyro wraps options, but not the description; help texts explain a default of None.
            whole = re.sub(r"\s+\(default:\s*(None)?\)", "", output.getvalue())
            lines = (fill(line, _HELP_COLUMNS) for line in whole.splitlines())
            text, is_short = "\n".join(lines), help_option != "--help-all" and command.common
            if command.recipes:
                text = _with_starts(text, command.recipes)
            print(_short_help(text, command.common) if is_short else text)
            raise
        check(config)
        return config

    def _start(self, command: str) -> tuple[Any, list[str], list[str]]:
        """The config of --recipe or --config, the names in it (MODEL, OUT), other arguments."""
        start = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        start.add_argument("--recipe")
        start.add_argument("--config", type=Path)
        try:
            chosen, rest = start.parse_known_args(self.arguments)
        except argparse.ArgumentError as error:
            raise UserError(f"{error}. See dotmoe {self.name} --help.") from error
        if chosen.recipe and chosen.config:
            raise UserError("--recipe and --config both name a starting config. Give one of them.")
        config = recipe_of(command, chosen.recipe)
        if chosen.config:
            try:
                values = read_json(chosen.config)
            except DamagedError as error:
                raise UserError(f"{error}. Name the config.json of a run.") from error
            config = from_values(type(config), values, str(chosen.config))
            if isinstance(config, RunConfig):  # its repair is the one that the time allowed
                config = replace(config, time=None)
        places = ("model" if command == "convert" else "run", "out")
        named = [name for place in places if (name := getattr(config, place))]
        return replace(config, **dict.fromkeys(places, tyro.MISSING)), named, rest


def _attributes_in_one_line(
    obj: Any, parse: Callable[..., Any] = docstring_parser.parse_from_object
) -> Any:
    """Docstrings with each attribute on one line, because tyro keeps breaks before an indent."""
    parsed = parse(obj)
    for attribute in parsed.params:
        attribute.description = " ".join((attribute.description or "").split()) or None
    return parsed


def _with_starts(text: str, command: str) -> str:
    """Tyro's help with --recipe and --config below --help, in its columns."""
    says = {
        "--recipe NAME": f"Settings to start from: {', '.join(RECIPES[command])}. Other options "
        "override them.",
        "--config FILE": "config.json of an earlier run to start from, instead of a recipe.",
    }

    def below(help_option: re.Match[str]) -> str:
        indent, lines = " " * len(help_option[1].splitlines()[-1]), [help_option[0]]
        for name, said in says.items():
            start = f"  {name}".ljust(len(indent))
            first = start if start.endswith(" ") else f"{start}\n{indent}"
            lines.append(
                first + fill(said, _HELP_COLUMNS - len(indent)).replace("\n", f"\n{indent}")
            )
        return "\n".join(lines)

    return re.sub(r"^(  -h, --help\s+)show.*$", below, text, flags=re.MULTILINE)


def _short_help(text: str, common: Sequence[str]) -> str:
    """Usage, description and common options of a command, cut out of its full help."""
    head, _, rest = text.partition(" positional arguments")
    starts = r"  (--[\w-]+|[A-Z]+(?= |$))"
    matches = re.finditer(rf"^{starts}.*(?:\n(?!{starts}|\s*$).+)*", rest, re.MULTILINE)
    blocks = {match[1]: re.sub(r" +$", "", match[0], flags=re.MULTILINE) for match in matches}
    names = [name for name in blocks if not name.startswith("--")]
    shown = [blocks[name] for name in (*names, *(f"--{option}" for option in common))]
    number = len(blocks) - len(names) + 1  # with --help
    return "\n".join([head.rstrip(), "", *shown, f"  {'--help-all':<24}show all {number} options"])


def _in_one_line(output: str) -> str:
    r"""The first section of tyro's error, with the nearest option or choice if there is one.

    Example:
        >>> _in_one_line(" Error\n ---\n  No option: --stpes\n  ---\n  Perhaps you meant: --steps")
        'No option: --stpes. Did you mean --steps?'
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    sections = re.split(r"^ +-+ *$", plain, flags=re.MULTILINE)  # after the title
    _, text, *others = (" ".join(section.split()) for section in sections)
    offered = next((section for section in others if "Perhaps you meant" in section), "")
    wrong, *choices = re.findall(r"'([^']*)'", text) or [""]
    near: Sequence[str] = re.findall(r"(?<=\s)--[a-z][\w-]*", offered)
    hint = f" Did you mean {near[0]}?" if near else nearest(wrong, choices)
    return f"{text.rstrip('.')}.{hint}"


class _Output(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # `run` does not count it as a failure; Rich exits with 1


def _show(*parts: Any, to_stderr: bool = False) -> None:
    """Print text literally and tables with frames; in a file or pipe nothing is wrapped."""
    console = _Output(stderr=to_stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _ALL_COLUMNS
    for part in parts:
        console.print(part)


def run_quickstart(line: Line) -> None:
    _show(page.quickstart_summary(quickstart(line.config(QuickstartConfig), Progress())))


def run_inspect(line: Line) -> None:
    config = line.config(InspectConfig)
    dense, folder = dense_config(config.model)
    plan = inspect_model(dense, config, stored=stored_dtype(dense, folder))
    plan = {"model": config.model, **plan}
    _show(json.dumps(plan, indent=2) if config.json else render(plan))


def run_convert(line: Line) -> None:
    _show_conversion(convert(line.config(RunConfig), Progress()))


def run_finetune(line: Line) -> None:
    _show_conversion(finetune(line.config(FinetuneRunConfig), Progress()))


def _show_conversion(conversion: Conversion) -> None:
    if conversion.results:  # on rank zero only
        _show(page.summary(conversion.folder))


def run_compare(line: Line) -> None:
    config = line.config(CompareConfig)
    summary = compare(config, Progress())
    text = f"{', '.join(summary['text'])}: {summary['protocol']}"
    files = f"runs, compare.json, compare.md in {config.out}"
    _show(to_rich(table(summary)), text, files)
    if failed := summary["left_out"]:
        raise UserError(
            f"{len(failed)} runs failed: {', '.join(failed)}. The table says why; the others are "
            "kept. Mend the causes and give the same command again, or leave those methods out."
        )


def run_export(line: Line) -> None:
    config = line.config(ReexportConfig, f"\n\n{explained()}\n\n{_GGUF}")
    with Progress().bar("export") as update:
        record = reexport(config, update)
    split = f"{record.active_experts} of {record.num_experts} experts"
    if config.in_place:
        active = f"{record.parameters['active']:,} parameters active."
        _show(f"{config.run}: {split} run per token, {active}", *map("- {}".format, record.notes))
        return
    was_run = (record.verification or {}).get("run", True)  # None: a GGUF without llama.cpp
    verified = "verified" if was_run else "its bytes verified; not run without llama-cpp-python"
    _show(
        f"{config.out}: {record.format}, {split if record.num_experts else 'dense'}, "
        f"{record.total_bytes:,} bytes in {record.dtype}, {verified}.",
        *(f"- {note}" for note in record.notes),
    )


def run_evaluate(line: Line) -> None:
    config = line.config(EvaluateConfig)
    result = evaluate(config, Progress(), str(line))
    _, show = MEASUREMENTS[config.measurement]
    shown = (to_rich(part) if isinstance(part, Table) else part for part in show(result))
    _show(*([json.dumps(result, indent=2)] if config.json else shown))


def run_analyse(line: Line) -> None:
    config = line.config(AnalyseConfig)
    for name, result in analyse(config, Progress(), str(line)).items():
        _show(f"{name}: {Path(config.run)}/6_evaluate/analysis/{name}.json")
        _show(*(f"  {sentence}" for sentence in result["says"]))


def run_bench(line: Line) -> None:
    config = line.config(bench.BenchConfig)
    dense, moe = (str(gguf_file(Path(name)) or name) for name in (config.dense, config.moe))
    with Progress().bar("bench") as update:
        result = bench.bench(replace(config, dense=dense, moe=moe), update)
    _show(json.dumps(result, indent=2) if config.json else to_rich(bench.table(result)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportConfig:
    """One page on what a conversion lost and gained."""

    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN")]
    """Folder of a finished `dotmoe convert`, `finetune` or `quickstart`."""
    out: str | None = None
    """File to write the page to, and no plots. Default: `7_report/report.html` in RUN, and plots as
    SVG and PNG in `7_report/plots`; for a quickstart `report.html` and `plots` in RUN itself."""


def run_report(line: Line) -> None:
    config = line.config(ReportConfig)
    folder, out = Path(config.run), Path(config.out) if config.out else None
    if out and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise UserError(f"--out {out} is not a file in an existing folder. Name one, as a.html.")
    plots_folder = None if out else page.default_page(folder).with_name("plots")
    print(page.html_report(folder, out, plots_folder))
    if not plots.is_installed():
        _show(plots.NO_PLOTS, to_stderr=True)
