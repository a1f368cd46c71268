"""Scores of benchmark tasks as a table, beside those of another model, with notes."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from dotmoe.common.files import Values
from dotmoe.common.tables import Table, figure, table_of
from dotmoe.measure.evaluate.difference import (
    IncomparableError,
    require_asked_alike,
    score_difference,
)
from dotmoe.measure.evaluate.models import sides_of
from dotmoe.measure.evaluate.tasks import is_share, main_scores


def shown_tasks(result: Values) -> list[Table | str]:
    """Table of the main scores of each model; lines with their average and notes on the tasks.

    Scores that were not asked for with the same settings have no difference; a line says why.
    """
    sides = sides_of(result)
    scores = [main_scores(side["tasks"]) for side in sides]
    others = scores[0]
    unlike = dict[str, str]()
    if len(sides) > 1:
        unlike = _asked_unlike(sides[1]["tasks"], sides[0]["tasks"])

    def guessing(score: Values) -> str:
        chance = score["chance"]
        return figure(None if chance is None else 100 * chance, ".0f")

    def of_other(score: Values) -> str | None:
        return with_error(others.get(score["task"]))

    def change(score: Values) -> str | None:
        if score["task"] in unlike:
            return None
        return shown_change(score, others.get(score["task"]))

    columns: dict[str, Callable[[Values], str | None]] = {
        "task": lambda score: score["task"],
        "metric": lambda score: score["metric"],
        "shots": lambda score: str(score["shots"]),
        "questions": lambda score: f"{score['questions']:,}",
        "guessing": guessing,
        sides[0]["name"]: of_other,
    }
    if len(sides) > 1:
        columns[sides[1]["name"]] = with_error
        columns["difference"] = change
    table = table_of(
        scores[-1].values(),
        columns,
        title="Benchmark tasks, per cent ± one standard error",
        note="guessing: evenly, or always the most frequent answer. *: the difference exceeds two "
        "standard errors.",
        words=2,
    )
    return [table, *_average_lines(result, sides), *_note_lines(sides, unlike)]


def _average_lines(result: Values, sides: Sequence[Values]) -> Iterator[str]:
    """Yield each average of each model, and how much of the dense model's is kept."""
    for side in sides:
        for label, average in side["averages"].items():
            if label != "tasks" or len(side["averages"]) == 1:
                of = ", ".join(f"{name} {100 * value:.1f}" for name, value in average["of"].items())
                yield f"{side['name']}: {with_error(average)}, average of {label} ({of})"
    for label, shares in result.get("kept", {}).items():
        kept = [f"{_percent(each)} {name.replace('_', ' ')}" for name, each in shares.items()]
        yield f"{sides[1]['name']} keeps of the average of {label}: {', '.join(kept)}"


def _note_lines(sides: Sequence[Values], unlike: Mapping[str, str]) -> Iterator[str]:
    """Yield each note on the tasks, and why scores have no difference, after the tasks' names."""
    notes = dict[str, list[str]]()
    for side in sides:
        for name, task in side["tasks"].items():
            for note in task["notes"]:
                notes.setdefault(note, []).append(name)
    for name, why in unlike.items():
        notes.setdefault(f"no difference: {why.rstrip('.')}", []).append(name)
    for note, names in notes.items():
        yield f"{', '.join(dict.fromkeys(names))}: {note}."


def _asked_unlike(tasks: Mapping[str, Values], others: Mapping[str, Values]) -> dict[str, str]:
    """Why scores do not compare, for each task of two models that was not asked alike."""
    unlike = dict[str, str]()
    for name in tasks.keys() & others.keys():
        try:
            require_asked_alike(tasks[name], others[name])
        except IncomparableError as error:
            unlike[name] = str(error)
    return unlike


def differ(score: Values, other: Values) -> bool:
    """Whether two scores differ by more than two standard errors of their difference."""
    _, stderr = score_difference(score, other)
    return stderr is not None and abs(score["value"] - other["value"]) > 2 * stderr


def shown_change(score: Values, other: Values | None) -> str | None:
    """How far a score is above another, with its error; `*` if by more than two of them."""
    if other is None:
        return None
    change, stderr = score_difference(score, other)
    factor = 100 if is_share(score) else 1
    error = "" if stderr is None else f" ± {factor * stderr:.2g}"
    mark = " *" if differ(score, other) else ""
    return f"{factor * change:+.3g}{error}{mark}"


def _percent(share: tuple[float, float | None] | None) -> str:
    if share is None:
        return "an unknown share"
    error = "" if share[1] is None else f" ± {100 * share[1]:.1f}"
    return f"{100 * share[0]:.1f}{error} %"


def with_error(score: Values | None) -> str | None:
    """A score and its standard error, if that is known; shares of right answers in per cent."""
    if score is None:
        return None
    factor = 1
    form = ".3f"
    if is_share(score):
        factor = 100
        form = ".1f"
    error = "" if score["stderr"] is None else f" ± {factor * score['stderr']:{form}}"
    return f"{factor * score['value']:{form}}{error}"
