"""The report as one self-contained HTML page: no script, nothing loaded from anywhere."""

import re
from collections.abc import Iterator
from pathlib import Path

from dotmoe.report.elements import Markup, command, element, joined, paragraph
from dotmoe.report.plots import Plot, draw_all, is_installed, reading, save_all
from dotmoe.report.result_files import ResultFiles, read_quickstart, read_run
from dotmoe.report.sections import SECTIONS, Context, Missing, Section, verdict

_STYLE = Path(__file__).with_name("page.css")

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""A browser then refuses scripts and whatever would have to be fetched."""

NO_PLOTS = "matplotlib is not installed, so there are no plots: pip install 'dotmoe[plots]'."


def html_report(run: Path, page: Path | None = None, plots_folder: Path | None = None) -> Path:
    """Write the page of a run, or of a quickstart with both of its splits.

    Args:
        run: Folder of `dotmoe convert`, `finetune` or `quickstart`.
        page: File to write. Default: `default_page`.
        plots_folder: Receives each plot as SVG and PNG. Default: plots are in the page only.

    Raises:
        UserError: No finished run, or a result file that is damaged.
    """
    found = read_quickstart(run) or read_run(run)
    page = page or default_page(run)
    plots = draw_all(found, in_pixels=plots_folder is not None) if is_installed() else {}
    text = rendered(found, plots)
    page.parent.mkdir(exist_ok=True)
    page.write_text(text, encoding="utf-8")
    if plots_folder is not None:
        save_all(plots, plots_folder)
    return page


def default_page(run: Path) -> Path:
    """`7_report/report.html` of a run, `report.html` of a quickstart."""
    is_quickstart = (run / "quickstart.json").is_file()
    return (run if is_quickstart else run / "7_report") / "report.html"


def rendered(found: ResultFiles, plots: dict[str, Plot]) -> str:
    """The page as text. The same result files give the same page.

    Raises:
        UserError: A result file lacks what the page shows of it.
    """
    context = Context(found=found, plots=plots)
    with reading(found, "6_evaluate/results.json"):
        top = verdict(context)
    parts = []
    for make, file in SECTIONS:
        with reading(found, file):
            parts += make(context)
    sections = [part for part in parts if isinstance(part, Section)]
    missing = [part for part in parts if isinstance(part, Missing)]
    if missing:
        sections.append(Section(title="Not measured yet", body=_not_measured(missing)))
    title = f"{_title(found)} as a Mixture-of-Experts"
    notes = [] if is_installed() else [paragraph(NO_PLOTS, class_="note")]
    main = element(
        "main",
        element("h1", title),
        top,
        *notes,
        _contents(sections),
        *_with_anchors(sections),
    )
    return (
        "<!DOCTYPE html>\n"
        + element("html", _head(title), element("body", main), lang="en").replace("><h2", ">\n<h2")
        + "\n"
    )


def _title(found: ResultFiles) -> str:
    name = found.dense_model or found.source
    return name + (", finetuned," if found.kind == "finetune" else "")


def _head(title: str) -> Markup:
    style = Markup(_STYLE.read_text(encoding="utf-8"))
    width = "width=device-width, initial-scale=1"
    return element(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta name="viewport" content="{width}">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        element("title", title),
        element("style", style),
    )


def _contents(sections: list[Section]) -> Markup:
    links = [element("a", part.title, href=f"#{_anchor(part)}") for part in sections]
    return element("nav", *links, aria_label="contents")


def _with_anchors(sections: list[Section]) -> Iterator[Markup]:
    for part in sections:
        yield element("section", element("h2", part.title), part.body, id=_anchor(part))


def _anchor(section: Section) -> str:
    return re.sub(r"[^a-z]+", "-", section.title.lower()).strip("-")


def _not_measured(missing: list[Missing]) -> Markup:
    items = [element("li", f"{part.what}:", command(part.command)) for part in missing]
    after = paragraph("Each command adds to the run; then dotmoe report makes this page anew.")
    return joined([element("ul", *items, class_="missing"), after])
