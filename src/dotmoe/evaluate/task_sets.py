"""Benchmark tasks: what the paper's tables have of each, and which local file holds which split.

Of a task only the source of its rows is changed: a YAML file includes the harness's own definition
and overrides that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dotmoe.errors import UserError, nearest
from dotmoe.files import sha256_of

SUFFIXES = (".jsonl.gz", ".jsonl", ".json", ".json.gz")


@dataclass(frozen=True, slots=True)
class Task:
    """One task of the harness. Local files have no suffix here; the first that exists is taken."""

    metric: str
    """Of the paper's table: `acc`, or `acc_norm`, the answer with the largest likelihood a byte."""
    shots: int | None
    """Solved examples before each question in the paper's tables; None: it is in none."""
    definition: str
    """The harness's YAML of the task, below its folder of tasks, without its suffix."""
    scored: tuple[str, ...]
    """Local files that may be scored; the name begins with that of their split. Solved examples
    are those of `train` beside them, or its stand-in."""

    @property
    def train(self) -> tuple[str, ...]:
        """Local files of solved examples."""
        name = f"{self.scored[0].rpartition('/')[0]}/train"
        return (name, *(path for path in STAND_INS if path.startswith(name)))


TASKS = {
    "boolq": Task("acc", 32, "super_glue/boolq/default", ("boolq/validation",)),
    "sciq": Task("acc", 0, "sciq/sciq", ("sciq/test", "sciq/validation")),
    "piqa": Task("acc", 0, "piqa/piqa", ("piqa/validation",)),
    "winogrande": Task("acc", 5, "winogrande/default", ("winogrande_xl/validation",)),
    "arc_challenge": Task("acc_norm", 25, "arc/arc_challenge", ("ai2_arc/ARC-Challenge/test",)),
    "hellaswag": Task("acc_norm", 10, "hellaswag/hellaswag", ("hellaswag/validation",)),
    # The paper does not state the shots of ARC-E.
    "arc_easy": Task("acc_norm", 0, "arc/arc_easy", ("ai2_arc/ARC-Easy/test",)),
    "wikitext": Task("", None, "wikitext/wikitext", ("wikitext/test", "wikitext2/test_documents")),
}
"""The one place that knows tasks, by the harness's names."""

STAND_INS = {
    "sciq/validation": "scored on the validation split, since there is no sciq/test: the official "
    "number is of the test split",
    "hellaswag/train_fewshot_11": "solved examples are drawn from 11 rows of the training split, "
    "not from all 39,905, so that prompts differ from the official ones",
}
"""What to say where such a file is taken."""

PAPER = ("boolq", "sciq", "piqa", "winogrande", "arc_challenge", "hellaswag")
"""The six tasks of tab:zero_shot_results and tab:fine_tuned_results."""

TASK_SETS: dict[str, dict[str, str]] = {
    "paper": {name: TASKS[name].metric for name in PAPER},
    "paper-by-k": {
        "arc_easy": "acc_norm",
        "arc_challenge": "acc_norm",
        "piqa": "acc_norm",
        "winogrande": "acc",
        "hellaswag": "acc_norm",
    },
}
"""Sets by their names: the metric of each task. `paper-by-k` is the paper's table over k."""


def expanded(names: Sequence[str]) -> tuple[str, ...]:
    """Names of harness tasks, with the names of sets replaced by what is in them, each once."""
    return tuple(dict.fromkeys(task for name in names for task in TASK_SETS.get(name, [name])))


def main_metric(task: str, metrics: Sequence[str]) -> str | None:
    """The metric that stands for a task: the paper's, else `acc`, else the first measured."""
    wanted = (TASKS[task].metric if task in TASKS else "", "acc")
    return next((name for name in (*wanted, *metrics) if name in metrics), None)


def sets_with(task: str, metric: str) -> list[str]:
    """Names of the sets that have this task in this metric."""
    return [name for name, metrics in TASK_SETS.items() if metrics.get(task) == metric]


def averages(names: Sequence[str], scores: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Unweighted mean over the tasks of each set that was named, as the paper counts it, 0 to 1.

    A set that is not complete has no average.
    """
    found: dict[str, float] = {}
    for name in names:
        values = [score["value"] for score in scores if name in score["sets"]]
        if values and len(values) == len(TASK_SETS[name]):
            found[name] = sum(values) / len(values)
    return found


def require_known(names: Sequence[str], all_names: Sequence[str]) -> None:
    """Raise a `UserError` for a name that is neither a set nor a task, with the nearest one."""
    known = set(all_names)
    for name in expanded(names):
        if name not in known:
            raise UserError(
                f"{name} is no task of lm-evaluation-harness, nor one of the sets "
                f"{', '.join(TASK_SETS)}.{nearest(name, [*TASK_SETS, *known])} "
                "Name one that `lm_eval ls tasks` lists."
            )


class LocalFiles(NamedTuple):
    """Files found for one task, by split, and how they differ from the official data."""

    files: dict[str, Path]
    notes: list[str]

    def override(self) -> dict[str, Any]:
        """What a task's definition gets in place of its hub data set."""
        keys = {"train": "training_split", "validation": "validation_split", "test": "test_split"}
        return {
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {s: str(path) for s, path in self.files.items()}},
            **{key: split if split in self.files else None for split, key in keys.items()},
        }

    def digests(self) -> dict[str, dict[str, str]]:
        """Name and SHA-256 of each file, by split."""
        return {
            split: {"file": f"{path.parent.name}/{path.name}", "sha256": sha256_of(path)}
            for split, path in self.files.items()
        }


def local_files(folder: Path, name: str, shots: int) -> LocalFiles:
    """Files of one task below a folder; with solved examples (`shots`) a training split, too.

    Raises:
        UserError: The task is not in `TASKS`, or a file that it needs is not there.
    """
    if name not in TASKS:
        raise UserError(
            f"{name} has no place in a local folder; {', '.join(TASKS)} have. Leave out "
            "--task-data to take it from the hub."
        )
    files: dict[str, Path] = {}
    notes = []
    for paths, is_needed in ((TASKS[name].train, shots > 0), (TASKS[name].scored, True)):
        taken = _first(folder, paths)
        if taken is not None:
            split = Path(taken[0]).name.split("_")[0]
            files[split] = taken[1]
            notes += [STAND_INS[taken[0]]] if taken[0] in STAND_INS and is_needed else []
        elif is_needed:
            wanted = " or ".join(f"{path}{SUFFIXES[0]}" for path in paths)
            raise UserError(
                f"{name} needs {wanted} below {folder} (also as {', '.join(SUFFIXES[1:])}), and it "
                "is not there. Put it there, or leave out --task-data to take it from the hub."
            )
    return LocalFiles(files, notes)


def _first(folder: Path, names: tuple[str, ...]) -> tuple[str, Path] | None:
    """The first of some names that is there, and its file."""
    paths = ((name, folder / f"{name}{suffix}") for name in names for suffix in SUFFIXES)
    return next(((name, path.resolve()) for name, path in paths if path.is_file()), None)
