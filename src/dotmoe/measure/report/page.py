"""The report in three forms: an HTML page, Markdown, and the summary at the end of a command."""

import base64
import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape
from rich.console import Group, RenderableType
from rich.text import Text

from dotmoe.common.files import write_text
from dotmoe.common.tables import (
    ShellCommand,
    Table,
    to_markdown,
    to_rich,
    whole_line,
    without_html,
)
from dotmoe.measure.evaluate.answers_at_k import curve_in_short
from dotmoe.measure.evaluate.difference import times_perplexity
from dotmoe.measure.evaluate.kept import kept_in_short
from dotmoe.measure.evaluate.own_answers import ends_by_penalty, own_answers_table
from dotmoe.measure.report.plots import NO_PLOT, is_installed, quality_svg
from dotmoe.measure.report.results import RunResults
from dotmoe.measure.report.sections import Blocks, in_short, notes_for_serving, overview, sections
from dotmoe.method.granularity import targets_of
from dotmoe.models.chat import states_chats
from dotmoe.run.folder import STAGES
from dotmoe.text.writing import PENALTY

_HERE = Path(__file__).parent
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_HERE),
    autoescape=lambda name: "html" in str(name),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)
_TEMPLATES.filters |= {
    "unbroken": lambda text: _with_code(text.replace(" %", "\u00a0%")),
    "slug": lambda title: re.sub(r"[^a-z]+", "-", title.lower()).strip("-"),
    "markdown": to_markdown,
}


_PHONE_CHARACTERS = 44
"""Characters of a table's row that fit a phone of 390 pixels, beside the space between columns."""
_NAME_CHARACTERS = 18
"""Characters of a line of the first column there; longer names are broken."""


def _is_wider_than_a_phone(table: Table) -> bool:
    """Whether a row of a table would be cut on a phone, where headings are broken at words."""
    width = 0
    for index, heading in enumerate(table.columns):
        cells = [row[index] or "-" for row in table.rows]
        longest = max(map(len, [*heading.split(), *cells]), default=0)
        width += 1 + (longest if index else min(longest, _NAME_CHARACTERS))
    return width > _PHONE_CHARACTERS


_TEMPLATES.tests["wider_than_a_phone"] = _is_wider_than_a_phone


def _with_code(text: str) -> Markup:
    """Text for HTML in which what stands between backticks is code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def html_report(run: Path) -> Path:
    """Write a run's `7_report/report.html`, and Markdown next to it; return the page's path.

    Raises a `UserError` for an unfinished run or a damaged result file.
    """
    results = RunResults(run)
    file = run / STAGES["report"] / "report.html"
    write_text(file, html(results))
    write_text(file.with_suffix(".md"), markdown(results))
    return file


def html(run: RunResults) -> str:
    """The report as one HTML page that loads nothing."""
    shown = _shown(run)
    picture = b""
    if is_installed():
        alike = {n: m for n, m in run.models.items() if times_perplexity(m, run.results["dense"])}
        picture = quality_svg(alike, run.results["parameters"], run.files.get("curve"))
    return _TEMPLATES.get_template("page.html.jinja").render(
        **shown,
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        picture=base64.b64encode(picture).decode(),
        note="" if picture else NO_PLOT,
    )


def markdown(run: RunResults) -> str:
    """The report in Markdown: the same sections without the picture."""
    templates = _TEMPLATES.overlay(finalize=without_html)
    return templates.get_template("page.md.jinja").render(_shown(run))


def _shown(run: RunResults) -> dict[str, Any]:
    """Title, first screen and sections of a run."""
    results, counts = run.results, run.results["parameters"]
    sentence = in_short(results["moe"], results["dense"], counts)
    if kept := results.get("keep"):
        sentence += f" {kept_in_short(kept)}"
    first: Blocks = [sentence, overview(run.models, counts)]
    if run.own_answers:
        first.append(own_answers_table(run.own_answers))
    changed = f", {run.name}," if run.is_finetuned or run.is_repaired else ""
    title = f"{run.title}{changed} as a Mixture-of-Experts"
    return {"title": title, "first": first, "sections": sections(run)}


def summary(run: Path) -> RenderableType:
    """What `dotmoe convert` and `dotmoe finetune` print when they finish."""
    *tables, said = first_screen(run)
    shown = (to_rich(table) for table in tables if isinstance(table, Table))
    return Group(*shown, Text(f"\n{said}"), *_what_next(RunResults(run)))


def first_screen(run: Path) -> list[Table | str]:
    """The tables at the top of a run's report, and the sentence that sums them up."""
    said, *tables = _shown(RunResults(run))["first"]
    return [*tables, said]


def _said_at_the_end(results: RunResults, loops: str | None) -> list[str]:
    """Sentences below a run's tables; `loops` is what is said of answers that do not end."""
    said = list[str]()
    if curve := results.own_answers_curve:
        said.append(curve_in_short(curve))
    if loops:
        said.append(loops)
    said.append("The files hold all experts: what is saved is work, not disk or memory.")
    if lowered := results.export.context_lowered:
        said.append(lowered)
    return said


def _what_next(results: RunResults) -> list[RenderableType]:
    """Where the results are, and the commands that come next."""
    run, record = results.folder, results.export
    export = run / STAGES["export"]
    chats = states_chats(export)
    prompt = "What is the capital of France?" if chats else "Once upon a time"
    write = ["dotmoe", "evaluate", str(run), "--generate", "60", "--prompts", prompt]
    write += ["--chat-template"] if chats else ["--temperature", "0.8"]
    loops = ends_by_penalty(results.own_answers.get(results.name, {}))
    if loops:
        write += ["--repetition-penalty", f"{PENALTY:g}"]
    commands = {"generate": write}
    if any(server.startswith("vLLM") for server in record.servers):
        commands["serve"] = ["vllm", "serve", str(export), "--dtype", record.dtype]
        if record.format == "dotmoe":
            commands["serve"] += ["--trust-remote-code", "--enforce-eager"]
    if not results.is_finetuned and targets_of(results.splits) == "ffn":
        commands["recover"] = ["dotmoe", "finetune", str(run), f"{run}-finetuned"]
    count = len(notes_for_serving(results))
    notes = f" (with {count} notes for serving)" if count else ""
    return [
        *(Text(each) for each in _said_at_the_end(results, loops)),
        Text(""),
        whole_line(f"checkpoint  {export}"),
        whole_line(f"report      {run / STAGES['report'] / 'report.html'}{notes}"),
        *(ShellCommand(f"{name:<12}", words) for name, words in commands.items()),
    ]
