"""Benchmark tasks of one model or of two: the paper's, local data, averages, results kept."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from dotmoe.checkpoint import fingerprint
from dotmoe.distributed import resolved_device
from dotmoe.errors import UserError
from dotmoe.evaluate import harness
from dotmoe.evaluate.config import EvaluateConfig
from dotmoe.evaluate.models import model_folder
from dotmoe.files import Values, read_json, sha256_of, write_json
from dotmoe.load import resolved_dtype
from dotmoe.progress import Progress
from dotmoe.provenance import provenance
from dotmoe.run_folder import STAGES

FEWSHOT_SEED = 1234
"""The harness's own, with which solved examples are drawn."""
FORM = 3
"""Of the result files; a file of another form is refused."""
SUBFOLDERS = {"model": "tasks", "against": "against"}
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


def local_files(folder: Path, name: str, shots: int) -> tuple[dict[str, Path], list[str]]:
    """Files of one task below a folder, by split, and how they differ from the official data.

    With solved examples (`shots`) a training split is among them.

    Raises:
        UserError: The task is not in `TASKS`, or a file that it needs is not there.
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
        places = {folder / f"{path}{suffix}": path for path in paths for suffix in SUFFIXES}
        file = next((place for place in places if place.is_file()), None)
        if file is None:
            wanted = " or ".join(f"{path}{SUFFIXES[0]}" for path in paths)
            raise UserError(
                f"{name} needs {wanted} below {folder} (also as {', '.join(SUFFIXES[1:])}), and it "
                "is not there. Put it there, or leave out --task-data to take it from the hub."
            )
        files[Path(places[file]).name.split("_")[0]] = file.resolve()
        notes += [STAND_INS[path] for path in STAND_INS if path == places[file]]
    return files, notes


def measure_tasks(config: EvaluateConfig, progress: Progress) -> Values:
    """Run `config.benchmark.tasks`: of each model its `tasks`, as in their files, and `averages`.

    A task that is finished already, of the same model with the same settings, is read and not run
    again; one that was interrupted starts anew.

    Raises:
        UserError: The harness is not installed, a model, task or file is missing, a setting is out
            of range, or another result lies where one would be written.
    """
    version, asked = harness.require_harness(), config.benchmark
    names = list(dict.fromkeys(t for name in asked.tasks for t in TASK_SETS.get(name, [name])))
    dtype = resolved_dtype(config.load.dtype, resolved_device(config.load.device))
    local: dict[str, tuple[dict[str, Path], list[str]]] = {}
    identities: dict[str, Values] = {}
    for name in names:
        shots = TASKS[name].shots if name in TASKS and asked.shots is None else asked.shots
        if asked.task_data is not None:
            local[name] = local_files(Path(asked.task_data), name, shots or 0)
        identities[name] = {
            "form": FORM,
            "harness": version,
            "dtype": str(dtype).removeprefix("torch."),
            "limit": asked.limit,
            "max_length": asked.max_length,
            "shots": shots,
            "data": {s: _digest(path) for s, path in local[name][0].items()} if local else "hub",
        }

    run_folder = Path(config.model)
    default = Path(f"evaluation-{run_folder.name}")
    if (run_folder / STAGES["export"]).is_dir():
        default = run_folder / STAGES["evaluate"]
    kept_in = default if config.out is None else Path(config.out)

    @cache
    def loaded() -> tuple[Any, dict[str, list[Any]]]:
        sources = {name: (TASKS[name].definition, local[name][0]) for name in local}
        return harness.loaded_tasks(names, sources)

    def run(label: str, folder: Path) -> Values:
        runner, results = None, {}
        for name in names:
            identity = identities[name] | {"model": fingerprint(folder)}
            file = kept_in / SUBFOLDERS[label] / f"{name}.json"
            if file.is_file():
                results[name] = _finished(file, identity)
                progress.log(f"{config.names[label]}: {name} is finished already")
                continue
            manager, tasks = loaded()
            runner = runner or harness.harness_model(folder, config)
            progress.log(f"{config.names[label]}: {name}")
            found = harness.run_tasks(
                runner, manager, tasks[name], shots=identity["shots"], limit=asked.limit
            )
            mark(found["scores"], name)
            found["notes"] = [*(local[name][1] if local else []), *found["notes"]]
            results[name] = {
                "origin": "measured",
                "task": name,
                "model": {"name": config.names[label], "context": runner.max_length},
                "limit": asked.limit,
                **found,
                "identity": identity,
                "provenance": provenance(FEWSHOT_SEED),
            }
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, results[name])
        scores = [score for result in results.values() for score in result["scores"]]
        means = averages(asked.tasks, scores)
        return {"name": config.names[label], "averages": means, "tasks": results}

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


def _digest(path: Path) -> dict[str, str]:
    return {"file": f"{path.parent.name}/{path.name}", "sha256": sha256_of(path)}
