"""Make every experiment's README.md, and their table, from experiment.toml and the results."""

from pathlib import Path
from typing import Any

from dotmoe.tables import Table, to_markdown
from specification import HERE, STATUSES, Experiment, all_experiments

HEAD = """# Experiments

Each folder is a table or figure of the paper, named by its LaTeX label; the `quality` folders are
about our own additions to the method. `experiment.toml` states the paper's claim, the recipe at the
paper's scale and at a scale that runs here, and the finding; `quoted.json` has the paper's values,
marked as quoted. README.md is generated from both and from `results/experiments/NAME.json`, where
every number is measured.

```
make results/tab_zero_shot_results      # makes the missing runs and collects their numbers
```

Unless stated otherwise, all numbers are of the embedded model: 3.1M parameters, 5 layers of
768 neurons, Python source text, one thread. If a run is random, numbers are means of three seeds;
a difference within their spread is *undecided*. Trust the order, not the digits.
`runs.toml` lists the runs; experiments share them, and they are kept in `experiments/runs`.
"""


def readmes() -> dict[Path, str]:
    """Current text of every README of this folder, by file."""
    experiments = all_experiments()
    texts = {experiment.folder / "README.md": readme(experiment) for experiment in experiments}
    texts[HERE / "README.md"] = f"{HEAD}\n{overview()}\n"
    return texts


def overview() -> str:
    """A row per experiment: label, status, and which of the paper's findings show here."""
    rows = []
    for one in all_experiments():
        shows = (one.result() or {"shows": []})["shows"]
        found = "; ".join(f"{entry['text']}: {said(entry)}" for entry in shows)
        link = f"[`{one.label}`]({one.name}/README.md)"
        rows.append((link, one.title, one.reached, found))
    columns = ("label", "what", "status", "the paper's finding at small scale")
    return to_markdown(Table(columns=columns, rows=rows, words=4))


def said(entry: dict[str, Any]) -> str:
    """Verdict on a finding, in bold unless it shows."""
    verdict: str = entry["verdict"]
    return verdict if verdict == "shows" else f"**{verdict}**"


def readme(experiment: Experiment) -> str:
    """Full text of the README of an experiment."""
    parts = [
        f"# `{experiment.label}`: {experiment.title}",
        f"**Status: {experiment.reached}** ({STATUSES[experiment.reached]}).",
        f"## Claim\n\n{experiment.claim.strip()}",
        f"## At the paper's scale\n\n{experiment.paper_recipe.strip()}",
        f"## Scaled down\n\n{experiment.scaled_recipe.strip()}",
    ]
    quoted, result = experiment.quoted(), experiment.result()
    if quoted is not None:
        values = grid(quoted["rows"], "", digits=False)
        parts.append(f"## The paper's values (quoted)\n\n{values}")
        parts += [quoted["note"]] * bool(quoted["note"])
    if result is not None:
        parts += measured(experiment, result)
    parts.append(f"## Finding\n\n{experiment.finding.strip()}")
    return "\n\n".join(parts) + "\n"


def measured(experiment: Experiment, result: dict[str, Any]) -> list[str]:
    """Sections with the measurements made here."""
    parts = ["## Measured here"]
    parts += [grid(with_spreads(table), table["title"]) for table in result["tables"]]
    if result["shows"]:
        rows: list[tuple[str, ...]] = [
            (one["text"], " < ".join(map(shown, one["numbers"])), said(one))
            for one in result["shows"]
        ]
        columns: tuple[str, ...] = ("finding", "numbers, each to be below the next", "here")
        parts.append(to_markdown(Table(columns=columns, rows=rows, words=3)))
    if result["expected"]:
        rows = [
            (
                f"{one['row']}, {one['column']}",
                shown(one["expected"]),
                f"{one['tolerance']:.0%}",
                shown(one["value"]),
            )
            for one in result["expected"]
        ]
        columns = ("expected of a repeat", "value", "tolerance", "last run")
        parts.append(to_markdown(Table(columns=columns, rows=rows)))
    made = result["provenance"]
    runs = ", ".join(f"`{name}`" for name in result["runs"])
    of_runs = f" Runs: {runs} (`experiments/runs.toml`)." * bool(runs)
    parts.append(
        f"Collected at commit `{made['commit']}` on {made['hardware']}, torch "
        f"{made['versions']['torch']}; results/experiments/{experiment.name}.json.{of_runs}"
    )
    return parts


def with_spreads(table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of a table, with the minimum and maximum over seeds if they differ."""
    rows = {row: dict(cells) for row, cells in table["rows"].items()}
    for row, spreads in table["spreads"].items():
        for column, (least, most) in spreads.items():
            if least < most:
                rows[row][column] = f"{shown(rows[row][column])} ({shown(least)} to {shown(most)})"
    return rows


def grid(rows: dict[str, dict[str, Any]], title: str, *, digits: bool = True) -> str:
    """Rows of named values as a Markdown table; missing values are left empty."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    show = shown if digits else str
    cells = [[name, *(show(row.get(c, "")) for c in columns)] for name, row in rows.items()]
    return to_markdown(Table(title=title, columns=("", *columns), rows=cells))


def shown(value: Any) -> str:
    """A number with three or four digits; any other value unchanged."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.3f}"
