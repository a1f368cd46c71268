"""README.md of every experiment, and the table of all, from experiment.toml and the results."""

from pathlib import Path
from typing import Any

from dotmoe.tables import Table, to_markdown
from specification import HERE, STATUSES, Experiment, all_experiments

HEAD = """# Experiments

One folder a table or figure of the paper, named by its LaTeX label, and `quality`, of our own
additions to the method. `experiment.toml` says what the paper claims, how to make it at the paper's
scale, how at a scale that runs here, and what came out; `quoted.json` has values of the paper,
marked as quoted. Its README.md is made of these and of `results/experiments/NAME.json`, where every
number is measured.

```
make results/tab_zero_shot_results      # makes the runs that are missing, and collects
```

Unless said otherwise, everything here is the model that comes along: 3.1M parameters, 5 layers of
768 neurons, Python source text, one thread. Numbers are means of three seeds where there is
something random; what lies within their spread is *undecided*. Take the order and not the digits.
`runs.toml` lists the runs; they are shared between experiments and lie in `experiments/runs`.
"""


def readmes() -> dict[Path, str]:
    """Text of every README of this folder, as it should be."""
    experiments = all_experiments()
    texts = {experiment.folder / "README.md": readme(experiment) for experiment in experiments}
    texts[HERE / "README.md"] = f"{HEAD}\n{overview()}\n"
    return texts


def overview() -> str:
    """A row an experiment: label, status, and which of the paper's findings show here."""
    rows = []
    for one in all_experiments():
        shows = (one.result() or {"shows": []})["shows"]
        found = "; ".join(f"{entry['text']}: {said(entry)}" for entry in shows)
        link = f"[`{one.label}`]({one.name}/README.md)"
        rows.append((link, one.title, one.reached, found))
    columns = ("label", "what", "status", "the paper's finding at small scale")
    return to_markdown(Table(columns=columns, rows=rows, words=4))


def said(entry: dict[str, Any]) -> str:
    """The verdict on a finding."""
    verdict: str = entry["verdict"]
    return verdict if verdict == "shows" else f"**{verdict}**"


def readme(experiment: Experiment) -> str:
    """The whole README of an experiment."""
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
    """Sections about what was measured here."""
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
    """Rows of a table, with the least and greatest of the seeds where they differ."""
    rows = {row: dict(cells) for row, cells in table["rows"].items()}
    for row, spreads in table["spreads"].items():
        for column, (least, most) in spreads.items():
            if least < most:
                rows[row][column] = f"{shown(rows[row][column])} ({shown(least)} to {shown(most)})"
    return rows


def grid(rows: dict[str, dict[str, Any]], title: str, *, digits: bool = True) -> str:
    """Rows of named values as a Markdown table; a value that a row lacks is left empty."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    show = shown if digits else str
    cells = [[name, *(show(row.get(c, "")) for c in columns)] for name, row in rows.items()]
    return to_markdown(Table(title=title, columns=("", *columns), rows=cells))


def shown(value: Any) -> str:
    """Three or four digits of a number; other values as they are."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.3f}"
