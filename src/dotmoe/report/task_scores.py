"""Scores of benchmark tasks, model beside dense model, as rows for a table and for a plot."""

import math
from dataclasses import dataclass
from typing import Any

from dotmoe.report.result_files import ResultFiles, Values

NEAR = 2.0
"""Standard errors within which two scores are called the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One task in one metric."""

    task: str
    metric: str
    shots: int
    questions: int
    """Scored; 0: not known."""
    values: dict[str, float]
    """By `against` and `model`, those that were measured."""
    errors: dict[str, float | None]
    """Standard error of each."""
    chance: float | None
    """Of guessing, where that is known."""

    @property
    def is_share(self) -> bool:
        """Whether it is a share of right answers, from 0 to 1."""
        return self.metric in ("acc", "acc_norm", "exact_match")

    def is_near_chance(self, label: str) -> bool:
        """Whether a model's score cannot be told from guessing."""
        error = self.errors.get(label)
        if self.chance is None or error is None or label not in self.values:
            return False
        return self.values[label] - self.chance < NEAR * error

    def differs(self) -> bool:
        """Whether the two models differ by more than `NEAR` standard errors of the difference.

        The errors are taken as independent. Both models answer the same questions, so the error
        of the difference is smaller in truth, and a difference may be overlooked.
        """
        if len(self.values) < 2 or None in self.errors.values():
            return False
        error = math.hypot(*(e or 0.0 for e in self.errors.values()))
        return abs(self.values["model"] - self.values["against"]) > NEAR * error


def scores_of(found: ResultFiles) -> list[Score]:
    """Every task and metric that the model was measured in, in the order of the files."""
    return [
        _score(row, {label: found.tasks[label].get(task) for label in found.tasks})
        for task, result in found.tasks["model"].items()
        for row in result["scores"]
    ]


def main_scores(scores: list[Score]) -> list[Score]:
    """One score a task, that can be drawn: `acc`, or else the first share of right answers."""
    kept: dict[str, Score] = {}
    for score in scores:
        if score.is_share and (score.task not in kept or score.metric == "acc"):
            kept[score.task] = score
    return list(kept.values())


def mean_of(scores: list[Score], label: str) -> tuple[float, float] | None:
    """Unweighted mean of a model's scores, and its standard error; None if one is missing."""
    if not scores or any(label not in score.values for score in scores):
        return None
    mean = sum(score.values[label] for score in scores) / len(scores)
    return mean, math.hypot(*(s.errors[label] or 0.0 for s in scores)) / len(scores)


def plot_rows(scores: list[Score]) -> tuple[list[dict[str, Any]], list[str]]:
    """What `tasks_plot` wants: rows, and the labels of the models in them."""
    labels = [
        label
        for label in ("against", "model")
        if scores and all(label in score.values for score in scores)
    ]
    rows = [
        {
            "title": f"{score.task} ({score.shots}-shot)",
            "chance": score.chance,
            "scores": [score.values[label] for label in labels],
            "errors": [score.errors[label] for label in labels],
        }
        for score in scores
    ]
    return rows, labels


def _score(first: Values, results: dict[str, Values | None]) -> Score:
    there = {
        label: row
        for label, result in results.items()
        for row in (result or {}).get("scores", ())
        if (row["task"], row["metric"]) == (first["task"], first["metric"])
    }
    return Score(
        task=first["task"],
        metric=first["metric"],
        shots=first["shots"],
        questions=first["questions"],
        values={label: row["value"] for label, row in there.items()},
        errors={label: row["stderr"] for label, row in there.items()},
        chance=first["chance"],
    )
