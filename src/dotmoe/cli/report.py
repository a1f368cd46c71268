"""`dotmoe report RUN`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import Positional

from dotmoe.cli.parse import parse
from dotmoe.errors import UserError
from dotmoe.report import NO_PLOTS, default_page, html_report, is_installed


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportCommand:
    """One page that says what was lost and what was gained."""

    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN")]
    """Folder of a finished `dotmoe convert`, `finetune` or `quickstart`."""
    out: str | None = None
    """Write the page here, and the page alone. Default: `7_report/report.html` of RUN, and every
    plot as SVG and PNG in `7_report/plots`; of a quickstart `report.html` and `plots` in it."""


def run(arguments: Sequence[str]) -> None:
    """Write the page and say where it is."""
    command = parse(ReportCommand, "report", arguments)
    folder = Path(command.run)
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder. Name one that dotmoe convert has written.")
    said = Console(stderr=True, highlight=False)
    if not is_installed():
        said.print(NO_PLOTS, soft_wrap=True, markup=False)
    page = None if command.out is None else Path(command.out)
    if page is not None and (page.is_dir() or not page.absolute().parent.is_dir()):
        raise UserError(f"--out {page} is no file in a folder that exists. Name one, as a.html.")
    plots = default_page(folder).with_name("plots") if page is None else None
    print(html_report(folder, page, plots))
