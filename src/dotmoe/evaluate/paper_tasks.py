"""The paper's benchmark tasks: shots, metric, and how their average is taken."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from dotmoe.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperTask:
    """One column of a table."""

    name: str
    """What lm-evaluation-harness calls it."""
    title: str
    """What the table calls it."""
    metric: str
    """`acc`, or `acc_norm`: the answer with the largest likelihood a byte."""
    shots: int
    """Solved examples before each question."""
    shots_are_stated: bool = True
    """Whether the paper states them."""


PAPER = (
    PaperTask(name="boolq", title="BoolQ", metric="acc", shots=32),
    PaperTask(name="sciq", title="SciQ", metric="acc", shots=0),
    PaperTask(name="piqa", title="PIQA", metric="acc", shots=0),
    PaperTask(name="winogrande", title="WinoGrande", metric="acc", shots=5),
    PaperTask(name="arc_challenge", title="ARC-C", metric="acc_norm", shots=25),
    PaperTask(name="hellaswag", title="HellaSwag", metric="acc_norm", shots=10),
)
"""The six tasks of tab:zero_shot_results and tab:fine_tuned_results."""

PAPER_BY_K = (
    PaperTask(name="arc_easy", title="ARC-E", metric="acc_norm", shots=0, shots_are_stated=False),
    PaperTask(name="arc_challenge", title="ARC-C", metric="acc_norm", shots=25),
    PaperTask(name="piqa", title="PIQA", metric="acc_norm", shots=0),
    PaperTask(name="winogrande", title="WinoGrande", metric="acc", shots=5),
    PaperTask(name="hellaswag", title="HellaSwag", metric="acc_norm", shots=10),
)
"""The five tasks of the paper's table of one model at several k."""

TASK_SETS: dict[str, tuple[PaperTask, ...]] = {"paper": PAPER, "paper-by-k": PAPER_BY_K}


def expanded(names: Sequence[str]) -> tuple[str, ...]:
    """Names of harness tasks, with the names of sets replaced by what is in them, each once."""
    found = [
        task for name in names for task in ([t.name for t in TASK_SETS.get(name, ())] or [name])
    ]
    return tuple(dict.fromkeys(found))


def columns_of(names: Sequence[str]) -> tuple[PaperTask, ...]:
    """Columns of the table for what a user asked for; a set's own metrics where one is named."""
    sets = [TASK_SETS[name] for name in names if name in TASK_SETS]
    known = {task.name: task for tasks in (PAPER_BY_K, PAPER, *reversed(sets)) for task in tasks}
    return tuple(known[name] for name in expanded(names) if name in known)


def paper_shots(name: str) -> int | None:
    """Shots with which the paper's tables have a task; None: it is in none."""
    return next((t.shots for tasks in TASK_SETS.values() for t in tasks if t.name == name), None)


def averages(names: Sequence[str], metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Unweighted mean over the tasks of each set that was named, as the paper counts it, 0 to 1.

    Args:
        names: What the user asked for.
        metrics: Metrics of each finished task, by its name.
    """
    return {
        name: sum(metrics[task.name][task.metric] for task in TASK_SETS[name])
        / len(TASK_SETS[name])
        for name in names
        if name in TASK_SETS and all(task.name in metrics for task in TASK_SETS[name])
    }


def require_known(names: Sequence[str], all_names: Sequence[str]) -> None:
    """Refuse a name that is neither a set nor a task.

    Raises:
        UserError: The first such name, with the nearest one.
    """
    known = set(all_names)
    for name in expanded(names):
        if name not in known:
            near = get_close_matches(name, [*TASK_SETS, *known], n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UserError(
                f"{name} is no task of lm-evaluation-harness, nor one of the sets "
                f"{', '.join(TASK_SETS)}.{hint} Name one that `lm_eval ls tasks` lists."
            )
