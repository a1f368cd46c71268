"""Benchmark tasks of one model or of two: the paper's, local data, averages, results kept."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from dotmoe.checkpoint import fingerprint
from dotmoe.distributed import resolved_device
from dotmoe.errors import UserError
from dotmoe.evaluate import harness
from dotmoe.evaluate.models import SIDES, EvaluateConfig, model_folder
from dotmoe.files import Values, read_json, sha256_of, write_json
from dotmoe.load import resolved_dtype
from dotmoe.progress import Progress
from dotmoe.run_folder import STAGES, provenance
from dotmoe.tables import Table, figure, table_of

FEWSHOT_SEED = 1234
"""The harness's own, with which solved examples are drawn."""
FORM = 3
"""Of the result files; a file of another form is refused."""
SUFFIXES = (".jsonl.gz", ".jsonl", ".json", ".json.gz")


class Task(NamedTuple):
    """A task of the paper's tables, or one that can be read from a folder."""

    metric: str
    """Of the paper's table: `acc`, or `acc_norm`, the answer with the largest likelihood a byte."""
    shots: int | None
    """Solved examples before each question in the paper's tables; None: it is in none."""
    definition: str
    """The harness's YAML of the task, below its folder of tasks, without its suffix."""
    scored: tuple[str, ...]
    """Local files that may be scored, without suffix, the first that exists; the name begins with
    that of their split. Solved examples are those of `train` beside them, or its stand-in."""


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
STAND_INS = {
    "sciq/validation": "scored on the validation split, since there is no sciq/test: the official "
    "number is of the test split",
    "hellaswag/train_fewshot_11": "solved examples are drawn from 11 rows of the training split, "
    "not from all 39,905, so that prompts differ from the official ones",
}
"""What to say where such a file is taken."""
PAPER = ("boolq", "sciq", "piqa", "winogrande", "arc_challenge", "hellaswag")
"""The six tasks of tab:zero_shot_results and tab:fine_tuned_results."""
TASK_SETS = {
    "paper": {name: TASKS[name].metric for name in PAPER},
    "paper-by-k": {
        **dict.fromkeys(("arc_easy", "arc_challenge", "piqa", "hellaswag"), "acc_norm"),
        "winogrande": "acc",
    },
}
"""Sets by their names: the metric of each task. `paper-by-k` is the paper's table over k."""


def measure_tasks(config: EvaluateConfig, progress: Progress) -> Values:
    """Run `config.tasks`: of each model its `tasks`, as in their files, and `averages`.

    A task that is finished already, of the same model with the same settings, is read and not run
    again; one that was interrupted starts anew. Raises a `UserError`: no harness, model, task or
    file, or another result where one would be written.
    """
    version = harness.require_harness()
    names = list(dict.fromkeys(t for name in config.tasks for t in TASK_SETS.get(name, [name])))
    dtype = resolved_dtype(config.load.dtype, resolved_device(config.load.device))
    local: dict[str, dict[str, Path]] = {}
    notes: dict[str, list[str]] = {}
    identities: dict[str, Values] = {}
    for name in names:
        shots = TASKS[name].shots if name in TASKS and config.shots is None else config.shots
        data: Any = "hub"
        if config.task_data is not None:
            local[name], notes[name] = local_files(Path(config.task_data), name, shots or 0)
            data = {
                split: {"file": f"{file.parent.name}/{file.name}", "sha256": sha256_of(file)}
                for split, file in local[name].items()
            }
        identities[name] = {
            "form": FORM,
            "harness": version,
            "dtype": str(dtype).removeprefix("torch."),
            "limit": config.limit,
            "max_length": config.max_length,
            "shots": shots,
            "data": data,
        }
    run_folder = Path(config.model)
    is_run = (run_folder / STAGES["export"]).is_dir()
    default = run_folder / STAGES["evaluate"] if is_run else f"evaluation-{run_folder.name}"
    out = Path(config.out or default)

    @cache
    def loaded() -> tuple[Any, dict[str, list[Any]]]:
        sources = {name: (TASKS[name].definition, files) for name, files in local.items()}
        return harness.loaded_tasks(names, sources)

    def run(label: str, folder: Path) -> Values:
        model, runner, results = config.names[label], None, {}
        for name in names:
            identity = identities[name] | {"model": fingerprint(folder)}
            file = out / ("tasks" if label == "model" else label) / f"{name}.json"
            if file.is_file():
                results[name] = _finished(file, identity)
                progress.log(f"{model}: {name} is finished already")
                continue
            manager, tasks = loaded()
            runner = runner or harness.harness_model(folder, config)
            progress.log(f"{model}: {name}")
            found = harness.run_tasks(
                runner, manager, tasks[name], shots=identity["shots"], limit=config.limit
            )
            mark(found["scores"], name)
            found["notes"] = notes.get(name, []) + found["notes"]
            results[name] = {
                "origin": "measured",
                "task": name,
                "model": {"name": model, "context": runner.max_length},
                "limit": config.limit,
                **found,
                "identity": identity,
                "provenance": provenance(FEWSHOT_SEED),
            }
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, results[name])
        scores = [score for result in results.values() for score in result["scores"]]
        return {"name": model, "averages": averages(config.tasks, scores), "tasks": results}

    folders = {label: model_folder(name) for label, name in config.names.items()}
    with harness.quiet_harness():
        return {label: run(label, folder) for label, folder in folders.items()}


def _finished(file: Path, identity: Values) -> Values:
    """The result that is there already; `UserError` for another model's or other settings."""
    result = read_json(file)
    stored = result.get("identity", {})
    for key, value in identity.items():
        if stored.get(key) != value:
            values = "" if key in ("model", "data") else f" ({stored.get(key)}, not {value})"
            raise UserError(
                f"{file} holds a result with another {key}{values}. Choose another folder with "
                "--out, or delete that file."
            )
    return result


def local_files(folder: Path, name: str, shots: int) -> tuple[dict[str, Path], list[str]]:
    """Files of one task below a folder, by split, and how they differ from the official data.

    With solved examples (`shots`) a training split is among them. `UserError` for a task that is
    not in `TASKS`, or a file that it needs and that is not there.
    """
    if name not in TASKS:
        raise UserError(
            f"{name} has no place in a local folder; {', '.join(TASKS)} have. Leave out "
            "--task-data to take it from the hub."
        )
    files, notes = dict[str, Path](), []
    scored = TASKS[name].scored
    train = f"{Path(scored[0]).parent}/train"
    solved = (train, *(path for path in STAND_INS if path.startswith(train)))
    for paths in (solved, scored) if shots else (scored,):
        places = [(path, folder / f"{path}{suffix}") for path in paths for suffix in SUFFIXES]
        path, file = next((each for each in places if each[1].is_file()), ("", None))
        if file is None:
            wanted = " or ".join(f"{path}{SUFFIXES[0]}" for path in paths)
            raise UserError(
                f"{name} needs {wanted} below {folder} (also as {', '.join(SUFFIXES[1:])}), and it "
                "is not there. Put it there, or leave out --task-data to take it from the hub."
            )
        files[Path(path).name.split("_")[0]] = file.resolve()
        if path in STAND_INS:
            notes.append(STAND_INS[path])
    return files, notes


def mark(scores: Sequence[Values], asked: str) -> None:
    """Say of the scores of a task or group that was asked for which of its metrics count.

    `is_main`: it stands for the task: the paper's metric, else `acc`, else the first; of members of
    a group none does. `sets`: names of the sets that have this task in this metric.
    """
    metrics = [score["metric"] for score in scores if score["task"] == asked]
    wanted = (TASKS[asked].metric if asked in TASKS else "", "acc", *metrics)
    main = next((metric for metric in wanted if metric in metrics), None)
    for score in scores:
        key = score["task"], score["metric"]
        score["is_main"] = key == (asked, main)
        score["sets"] = [
            name for name, metric_of in TASK_SETS.items() if key == (asked, metric_of.get(asked))
        ]


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


def shown_tasks(result: Values) -> list[Table | str]:
    """The metrics that count; averages of sets, and what must be known of the tasks."""
    sides = [result[label] for label in SIDES if label in result]
    scores, averaged, notes = [], [], []
    for side in sides:
        rows = [score for task in side["tasks"].values() for score in task["scores"]]
        scores.append([score for score in rows if score["is_main"] or score["sets"]])
        for each, value in side["averages"].items():
            averaged.append(f"{side['name']}: {100 * value:.1f}, average of {each}")
        for name, task in side["tasks"].items():
            notes += [f"{name}: {note}." for note in task["notes"]]
    others = scores[0] if len(sides) > 1 else []
    table = scores_table(scores[-1], others, (sides[0]["name"], sides[-1]["name"]))
    return [table, *dict.fromkeys(averaged + notes)]


def scores_table(
    scores: Iterable[Values], others: Iterable[Values], names: tuple[str, str]
) -> Table:
    """Rows of a model's task files, beside those of another one where there are any.

    `names` are those of the other model, and of the model.
    """
    by_key = {(each["task"], each["metric"]): each for each in others}
    rows = [(score, by_key.get((score["task"], score["metric"]))) for score in scores]

    def change(row: tuple[Values, Values | None]) -> str | None:
        score, other = row
        if other is None:
            return None
        factor = 100 if is_share(score) else 1
        return f"{factor * (score['value'] - other['value']):+.3g}" + " *" * differ(score, other)

    return table_of(
        rows,
        {
            "task": lambda row: row[0]["task"],
            "metric": lambda row: row[0]["metric"],
            "shots": lambda row: str(row[0]["shots"]),
            "questions": lambda row: f"{row[0]['questions']:,}",
            "guessing": lambda row: figure(row[0]["chance"] and 100 * row[0]["chance"], ".0f"),
            **({names[0]: lambda row: _with_error(row[1])} if by_key else {}),
            names[1]: lambda row: _with_error(row[0]),
            **({"difference": change} if by_key else {}),
        },
        title="Benchmark tasks, per cent ± one standard error",
        note="guessing: evenly, or always the most frequent answer. *: the difference exceeds two "
        "standard errors.",
        words=2,
    )


def is_share(score: Values) -> bool:
    """Whether a score is a share of right answers, 0 to 1."""
    return score["metric"] in ("acc", "acc_norm", "exact_match")


def differ(score: Values, other: Values) -> bool:
    """Whether two scores differ by more than two standard errors, as if those were independent.

    Both models answer the same questions, so a difference may be overlooked.
    """
    error = math.hypot(score["stderr"] or math.inf, other["stderr"] or math.inf)
    return bool(abs(score["value"] - other["value"]) > 2 * error)


def _with_error(score: Values | None) -> str | None:
    if score is None:
        return None
    factor, form = (100, ".1f") if is_share(score) else (1, ".3f")
    error = "" if score["stderr"] is None else f" ± {factor * score['stderr']:{form}}"
    return f"{factor * score['value']:{form}}{error}"
