"""The report in three forms: an HTML page, Markdown, and the summary at the end of a command."""

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import jinja2
from rich.console import Group, RenderableType
from rich.text import Text

from dotmoe.common.files import Values
from dotmoe.common.tables import figure, to_markdown, to_rich
from dotmoe.measure.evaluate.perplexity import perplexity_table
from dotmoe.measure.report import RunResults
from dotmoe.measure.report.plots import NO_PLOTS, as_svg, draw_all, is_installed, save
from dotmoe.measure.report.sections import Blocks, gained, sections, verdict

_HERE = Path(__file__).parent
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_HERE),
    autoescape=lambda name: "html" in str(name),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)
_TEMPLATES.filters |= {
    "kept": lambda text: text.replace(" %", "\u00a0%"),
    "slug": lambda title: re.sub(r"[^a-z]+", "-", title.lower()).strip("-"),
    "markdown": to_markdown,
}


def html_report(run: Path, page: Path | None = None, plots_folder: Path | None = None) -> Path:
    """Write the HTML page of a run, or of a quickstart with both of its splits; return its path.

    Without `page` it writes `default_page`, and Markdown next to it. `plots_folder` receives each
    plot as SVG and PNG. Raises a `UserError` for an unfinished run or a damaged result file.
    """
    results, file = RunResults(run), page or default_page(run)
    figures = draw_all(results) if is_installed() else {}
    text = html(results, figures)
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8")
    if page is None:
        file.with_suffix(".md").write_text(markdown(results), encoding="utf-8")
    if figures and plots_folder is not None:
        save(figures, plots_folder)
    return file


def default_page(run: Path) -> Path:
    """Path of the page: `7_report/report.html` of a run, `report.html` of a quickstart."""
    return (run if (run / "quickstart.json").is_file() else run / "7_report") / "report.html"


def html(run: RunResults, figures: dict[str, Any]) -> str:
    """The report as one HTML page that loads nothing; `figures` are the plots of `draw_all`.

    Raises a `UserError` if a result file lacks a value that the page shows.
    """
    return html_page(**_shown(run), figures=figures)


def html_page(
    *,
    title: str,
    sections: Mapping[str, Blocks],
    figures: Mapping[str, Any],
    verdict: Sequence[str] = (),
) -> str:
    """An HTML page of the given sections; a plot block refers to one of `figures` by name."""
    return _TEMPLATES.get_template("page.html.jinja").render(
        title=title,
        verdict=verdict,
        sections=sections,
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        plots={name: base64.b64encode(as_svg(each)).decode() for name, each in figures.items()},
        note="" if is_installed() else NO_PLOTS,
    )


def markdown(run: RunResults) -> str:
    """The report in Markdown: the same sections without plots."""
    return _TEMPLATES.get_template("page.md.jinja").render(_shown(run))


def _shown(run: RunResults) -> dict[str, Any]:
    """Title, verdict and sections of a run."""
    blocks_by_title = sections(run)
    with run.reading("6_evaluate/results.json"):
        sentences = verdict(run)
    changed = f", {run.name}," if run.is_finetuned or run.is_repaired else ""
    title = f"{run.dense_model}{changed} as a Mixture-of-Experts"
    return {"title": title, "verdict": sentences, "sections": blocks_by_title}


def summary(run: Path) -> RenderableType:
    """What `dotmoe convert` and `dotmoe finetune` print when they finish."""
    results = RunResults(run)
    where = f"checkpoint  {run / '5_export'}\nreport      {default_page(run)}"
    text = "\n" + "\n\n".join([*verdict(results), where])
    return Group(to_rich(perplexity_table(results.models)), Text(text))


def quickstart_summary(result: Values) -> RenderableType:
    """What `dotmoe quickstart` prints when it finishes, from `quickstart.json`."""
    models = {
        "dense": result["dense"],
        "random split, router trained": result["random_split"],
        "DOT-MoE": result["dot_moe"],
        "random split, repaired": result["random_split_repaired"],
        "DOT-MoE, repaired": result["dot_moe_repaired"],
    }
    samples, checks = result["samples"], result["verification"].items()
    checked = ", ".join(f"{name.replace('_', ' ')} {figure(value)}" for name, value in checks)
    paragraphs = [
        "Both splits start from a router fitted to their experts, train for "
        f"{result['steps']} steps and are then repaired alike. Above dense: nats that were lost.",
        f"Gained: {gained(result)}",
        f"export against masked dense model: {checked}",
    ]
    for name in ("dense", "moe"):
        text = indent(samples[name], "    ")
        paragraphs.append(f"{name} continues {samples['prompt']!r}:\n{text}")
    paragraphs.append(f"checkpoint  {result['checkpoint']}\nreport      {result['report']}")
    return Group(to_rich(perplexity_table(models)), Text("\n" + "\n\n".join(paragraphs)))
