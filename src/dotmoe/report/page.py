"""The report in three forms: an HTML page, Markdown, and the end of a command on a terminal."""

import base64
import re
from pathlib import Path
from typing import Any

import jinja2
from rich.console import Group, RenderableType
from rich.text import Text

from dotmoe.report.plots import NO_PLOTS, as_svg, draw_all, is_installed, save
from dotmoe.report.read import RunResults, Values, read_run
from dotmoe.report.sections import Block, sections
from dotmoe.report.tables import (
    LABELS,
    curve_table,
    fidelity_table,
    perplexity_table,
    repetition_table,
    scores_table,
    word_table,
)
from dotmoe.report.verdict import gained, tiles, verdict
from dotmoe.tables import Table, figure, percent, to_markdown, to_rich

_HERE = Path(__file__).parent


def report(run: Path) -> Path:
    """Write `report.md` and `report.html` into `7_report` of a finished run.

    Returns:
        The second, which has the plots too.

    Raises:
        UserError: See `html_report`.
    """
    page = html_report(run)
    page.with_name("report.md").write_text(markdown(read_run(run)), encoding="utf-8")
    return page


def html_report(run: Path, page: Path | None = None, plots_folder: Path | None = None) -> Path:
    """Write the page of a run, or of a quickstart with both of its splits.

    Args:
        run: Folder of `dotmoe convert`, `finetune` or `quickstart`.
        page: File to write. Default: `default_page`.
        plots_folder: Receives each plot as SVG and PNG. Default: plots are in the page only.

    Raises:
        UserError: No finished run, or a result file that is damaged.
    """
    found = read_run(run)
    page = page or default_page(run)
    figures = draw_all(found) if is_installed() else {}
    text = html(found, figures)
    page.parent.mkdir(exist_ok=True)
    page.write_text(text, encoding="utf-8")
    if plots_folder is not None:
        save(figures, plots_folder)
    return page


def default_page(run: Path) -> Path:
    """`7_report/report.html` of a run, `report.html` of a quickstart."""
    is_quickstart = (run / "quickstart.json").is_file()
    return (run if is_quickstart else run / "7_report") / "report.html"


def html(found: RunResults, figures: dict[str, Any]) -> str:
    """One page without scripts that loads nothing; the same results give the same page.

    Args:
        found: What was measured.
        figures: Plots by name, from `draw_all`.

    Raises:
        UserError: A result file lacks what the page shows of it.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["kept"] = lambda text: text.replace(" %", "\u00a0%")
    environment.filters["slug"] = lambda title: re.sub(r"[^a-z]+", "-", title.lower()).strip("-")
    with found.reading("6_evaluate/results.json"):
        top = {"verdict": verdict(found), "tiles": tiles(found)}
    return environment.get_template("page.html.jinja").render(
        title=_title(found),
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        sections=sections(found),
        plots={name: base64.b64encode(as_svg(each)).decode() for name, each in figures.items()},
        note="" if is_installed() else NO_PLOTS,
        **top,
    )


def markdown(found: RunResults) -> str:
    """The same sections in Markdown, without plots."""
    parts = [f"# {_title(found)}", *verdict(found)]
    for title, blocks in sections(found).items():
        parts += [f"## {title}", *(_in_markdown(block) for block in blocks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary(run: Path) -> RenderableType:
    """The end of `dotmoe convert` or `finetune` on a terminal."""
    found = read_run(run)
    said = "\n\n".join(verdict(found))
    where = f"checkpoint  {run / '5_export'}\nreport      {default_page(run)}"
    return Group(to_rich(perplexity_table(found.models)), Text(f"\n{said}\n\n{where}"))


def evaluation(name: str, result: Values) -> RenderableType:
    """The end of `dotmoe evaluate` on a terminal.

    Args:
        name: Of the measurement.
        result: What `dotmoe.evaluate.evaluate` gives.
    """
    there = [result[side] for side in LABELS if isinstance(result.get(side), dict)]
    sides = {str(side["name"]): side for side in there}
    after: list[str] = []
    match name:
        case "tasks":
            table, after = _tasks(sides)
        case "word_perplexity":
            table = word_table(result)
        case "fidelity":
            table = fidelity_table(result)
        case "generation":
            table = repetition_table(result)
            for index, prompt in enumerate(result["model"]["prompts"][:4]):
                after.append(f"--- {prompt!r}")
                after += [f"{each}: {s['greedy']['texts'][index]!r}" for each, s in sides.items()]
        case "curve":
            table = curve_table(result)
        case _:
            table = perplexity_table(sides or {str(result["name"]): result})
    return Group(to_rich(table), *map(Text, after))


def _tasks(sides: dict[str, Values]) -> tuple[Table, list[str]]:
    """The metrics that count; averages of sets, and what must be known of the tasks."""
    scores: list[list[Values]] = [[]]
    lines = []
    for name, side in sides.items():
        rows = [score for task in side["tasks"].values() for score in task["scores"]]
        scores.append([score for score in rows if score["is_main"] or score["sets"]])
        lines += [
            f"{name}: {100 * v:.1f}, average of {each}" for each, v in side["averages"].items()
        ]
    for side in sides.values():
        lines += [f"{name}: {n}." for name, task in side["tasks"].items() for n in task["notes"]]
    names = list(sides)
    table = scores_table(scores[-1], scores[-2], (names[0], names[-1]))
    return table, list(dict.fromkeys(lines))


def quickstart_summary(result: Values) -> RenderableType:
    """The end of `dotmoe quickstart` on a terminal, from `quickstart.json`."""
    models = {
        "dense": result["dense"],
        "random split, router trained": result["random_split"],
        "DOT-MoE": result["dot_moe"],
    }
    samples, verified = result["samples"], result["verification"]
    checks = [f"{name.replace('_', ' ')} {figure(value)}" for name, value in verified.items()]
    said = [
        f"gap to dense: {percent(result['gap_ratio'])} of the random split's",
        f"Gained: {gained(result, {})}",
        f"export against masked dense model: {', '.join(checks)}",
        *(
            f"{name} continues {samples['prompt']!r}:\n{_indented(samples[name])}"
            for name in ("dense", "moe")
        ),
        f"checkpoint  {result['checkpoint']}\nreport      {result['report']}",
    ]
    return Group(
        to_rich(perplexity_table(models)),
        Text("\n" + "\n\n".join(said)),
    )


def _title(found: RunResults) -> str:
    finetuned = ", finetuned," if found.command == "finetune" else ""
    return f"{found.dense_model}{finetuned} as a Mixture-of-Experts"


def _in_markdown(block: str | Table | Block) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, Table):
        return to_markdown(block)
    texts = block.content if block.kind == "sample" else {block.text: block.content}
    match block.kind:
        case "plot":
            return ""
        case "command":
            return _fenced(block.text)
        case "sample" | "folded":
            before = [_fenced(block.text)] * (block.kind == "sample")
            after = (f"{name}:\n\n{_fenced(text)}" for name, text in texts.items())
            return "\n\n".join([*before, *after])
    return block.text


def _fenced(text: str) -> str:
    return f"````text\n{text}\n````"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
