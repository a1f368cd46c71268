"""Benchmark tasks of one model or two: the paper's tasks, local data, averages, kept results."""

import math
import os.path
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from dotmoe.common.device import resolved_device
from dotmoe.common.errors import UserError, nearest
from dotmoe.common.files import Values, alone_in, read_json, sha256_of, write_json
from dotmoe.common.progress import Progress
from dotmoe.measure.config import EvaluateConfig, in_context
from dotmoe.measure.evaluate import harness
from dotmoe.measure.evaluate.difference import share_kept
from dotmoe.measure.evaluate.models import context_of, model_folder, require_unchanged_dense
from dotmoe.models.checkpoint import dtype_name
from dotmoe.models.identity import FINGERPRINT, fingerprint
from dotmoe.models.load import resolved_dtype
from dotmoe.run.folder import STAGES
from dotmoe.run.provenance import provenance

SUFFIXES = (".jsonl.gz", ".jsonl", ".json", ".json.gz")


class BenchmarkTask(NamedTuple):
    """A task of the paper's tables, or one that can be read from a folder."""

    metric: str
    """Main metric, in the paper's table if it is there. `acc_norm`: by log-likelihood per byte."""
    shots: int | None
    """Number of solved examples before a question: the paper's, else the harness's; None: none."""
    definition: str
    """Path of the harness's YAML for the task, in its folder of tasks, without suffix."""
    scored: str
    """Local file that is scored, without suffix; its name is the split. Solved examples come from
    the file `train` beside it."""


TASKS = {
    "boolq": BenchmarkTask("acc", 32, "super_glue/boolq/default", "boolq/validation"),
    "sciq": BenchmarkTask("acc", 0, "sciq/sciq", "sciq/test"),
    "piqa": BenchmarkTask("acc", 0, "piqa/piqa", "piqa/validation"),
    "winogrande": BenchmarkTask("acc", 5, "winogrande/default", "winogrande_xl/validation"),
    "arc_challenge": BenchmarkTask(
        "acc_norm", 25, "arc/arc_challenge", "ai2_arc/ARC-Challenge/test"
    ),
    "hellaswag": BenchmarkTask("acc_norm", 10, "hellaswag/hellaswag", "hellaswag/validation"),
    # The paper does not state the shots of ARC-E.
    "arc_easy": BenchmarkTask("acc_norm", 0, "arc/arc_easy", "ai2_arc/ARC-Easy/test"),
    "wikitext": BenchmarkTask("", None, "wikitext/wikitext", "wikitext/test"),
    "gsm8k": BenchmarkTask("exact_match,flexible-extract", 5, "gsm8k/gsm8k", "gsm8k/test"),
} | {
    name: BenchmarkTask("pass@1,create_test", 0, f"humaneval/{name}", "humaneval/test")
    for name in ("humaneval", "humaneval_instruct")
}
STAND_INS = {
    "sciq/test": {
        "sciq/validation": "scored on the validation split, official numbers on the test split"
    },
    "hellaswag/train": {
        "hellaswag/train_fewshot_11": "solved examples are drawn from 11 rows of the training "
        "split, not from all 39,905, so that prompts differ from the official ones"
    },
    "gsm8k/train": {
        "gsm8k/train_fewshot_64": "solved examples are drawn from 64 rows of the training split, "
        "not from all 7,473, so that prompts differ from the official ones"
    },
}
"""Local files that replace a missing one, and the note that results then get."""
PAPER = ("boolq", "sciq", "piqa", "winogrande", "arc_challenge", "hellaswag")
"""The six tasks of tab:zero_shot_results and tab:fine_tuned_results."""
SETS = {
    "paper": {name: TASKS[name].metric for name in PAPER},
    "paper_by_k": dict.fromkeys(("arc_easy", "arc_challenge", "piqa", "hellaswag"), "acc_norm")
    | {"winogrande": "acc"},
}
"""Sets of tasks for `--tasks`, with the paper's metrics: its six, and tab:sparsity_detailed."""


class _Asked(NamedTuple):
    """The tasks that are asked, by name."""

    identities: dict[str, Values]
    """What a result depends on beside the model: shots, data and settings; of every task."""
    local: dict[str, tuple[str, Mapping[str, Path]]]
    """Definition, and files by split, of tasks whose data lie in a folder."""
    notes: dict[str, list[str]]
    """How these data differ from the official ones."""


class _Side(NamedTuple):
    """One of the models that are asked."""

    name: str
    folder: Path
    fingerprint: str
    config: EvaluateConfig
    """The options for this model: its `max_length` may be less than its own context."""
    notes: list[str]
    """What is said of the scores of all its tasks."""
    out: Path
    """Folder of its results, a file for each task."""


def measure_tasks(config: EvaluateConfig, progress: Progress) -> Values:
    """Run `config.tasks`; gives each model's `tasks`, as in their files, and `averages`.

    A task that is already finished, for the same model and settings, is read and not run again; an
    interrupted one starts anew. Two models see the same number of tokens at once, by default the
    smaller of their contexts. Raises `UserError` if there is no such harness, model, task or file,
    or a result of other settings is where one would be written.
    """
    asked = _asked(config)
    folders = {label: model_folder(name) for label, name in config.names.items()}
    if "against" in folders:
        require_unchanged_dense(folders["model"], folders["against"])
    fingerprints = {label: fingerprint(folder) for label, folder in folders.items()}
    out = Path(config.out or default_folder(config.model, fingerprints["model"]))
    load_tasks = cache(
        lambda: harness.loaded_tasks(list(asked.identities), asked.local, list(SETS))
    )
    sides = {
        label: _Side(
            name=config.names[label],
            folder=folders[label],
            fingerprint=fingerprints[label],
            config=own_config,
            notes=_notes_on_asking(config.names[label], config, own_config),
            out=out / ("tasks" if label == "model" else label),
        )
        for label, own_config in _within_both(config, folders).items()
    }
    is_locked = config.out is not None  # by the caller
    lock = nullcontext() if is_locked else alone_in(out)
    with lock, harness.quiet_harness(shows_bars=not progress.is_quiet):
        result = {
            label: _results_of(side, asked, load_tasks, progress) for label, side in sides.items()
        }
    averages = result["model"]["averages"]
    others = result["against"]["averages"] if "against" in result else {}
    shared = averages.keys() & others.keys()
    return result | {
        "kept": {label: share_kept(averages[label], others[label]) for label in shared}
    }


def _results_of(
    side: _Side,
    asked: _Asked,
    load_tasks: Callable[[], Mapping[str, list[Any]]],
    progress: Progress,
) -> Values:
    """The tasks of one model, run or read; its weights and the tasks are loaded if one is run."""
    runner = cache(lambda: harness.harness_model(side.folder, side.config))
    results = dict[str, Values]()
    for name, same_of_all in asked.identities.items():
        identity = same_of_all | {"max_length": side.config.max_length, "model": side.fingerprint}
        file = side.out / f"{name}.json"
        if file.is_file():
            results[name] = _finished(file, identity)
            progress.log(f"{side.name}: {name} is finished already")
            continue
        progress.log(f"{side.name}: {name}")
        tasks = load_tasks()[name]
        scored = harness.run_tasks(
            runner(),
            tasks,
            shots=identity["shots"],
            limit=side.config.limit,
            as_chat=side.config.chat_template,
        )
        mark_main(scored["scores"], name)
        scored["notes"] = [*asked.notes.get(name, []), *scored["notes"], *side.notes]
        results[name] = {
            "origin": "measured",
            "task": name,
            "model": {
                "name": side.name,
                FINGERPRINT: side.fingerprint,
                "context": runner().max_length,
            },
            "limit": side.config.limit,
            **scored,
            "identity": identity,
            # The harness's own seed of solved examples.
            "provenance": provenance(1234, side.config.load.device),
        }
        write_json(file, results[name])
    return summary_of_model(side.name, results.values()) | {FINGERPRINT: side.fingerprint}


def _notes_on_asking(name: str, config: EvaluateConfig, own_config: EvaluateConfig) -> list[str]:
    """What is said of the scores of a model: a penalty, and a context cut by `own_config`."""
    notes = list[str]()
    if config.repetition_penalty != 1.0:
        penalty = f"{config.repetition_penalty:g}"
        notes.append(f"answers are written with repetition_penalty {penalty}")
    is_cut = own_config.max_length != config.max_length
    if is_cut:
        length = f"{own_config.max_length:,} tokens, the context of the model beside it"
        notes.append(f"{name} may see {length}, though its own is longer")
    return notes


def _asked(config: EvaluateConfig) -> _Asked:
    """How each of `config.tasks` is asked, those of a set one by one."""
    asked = _Asked(identities={}, local={}, notes={})
    settings = _settings(config)
    names = (SETS.get(name, (name,)) for name in config.tasks)
    for name in dict.fromkeys(chain.from_iterable(names)):
        shots = TASKS[name].shots if name in TASKS and config.shots is None else config.shots
        identity: Values = {"shots": shots} | settings
        asked.identities[name] = identity
        if config.task_data is not None:
            files, asked.notes[name] = local_files(Path(config.task_data), name, shots or 0)
            asked.local[name] = TASKS[name].definition, files
            identity["data"] = {
                split: {"file": f"{file.parent.name}/{file.name}", "sha256": sha256_of(file)}
                for split, file in files.items()
            }
    return asked


def _settings(config: EvaluateConfig) -> Values:
    """What results of all tasks depend on besides model, shots and data."""
    dtype = resolved_dtype(config.load.dtype, resolved_device(config.load.device))
    penalty = config.repetition_penalty
    return {
        "harness": harness.require_harness(),
        "dtype": dtype if dtype == "auto" else dtype_name(dtype),
        "limit": config.limit,
        "chat_template": config.chat_template or None,  # as in results from before the option
        "chat_answer": harness.CHAT_ANSWER if config.chat_template else None,
        "repetition_penalty": None if penalty == 1.0 else penalty,  # as before the option
        "data": "hub",
    }


def _within_both(config: EvaluateConfig, folders: Mapping[str, Path]) -> dict[str, EvaluateConfig]:
    """The config for each model: a model may see no more tokens at once than the one beside it.

    Raises `UserError` for a `max_length` beyond the smaller context.
    """
    contexts = {label: context_of(folder) for label, folder in folders.items()}
    smallest = min(contexts.values())
    in_context("max_length", config.max_length or smallest, smallest)
    if config.max_length is not None:
        return dict.fromkeys(folders, config)
    shorter = replace(config, max_length=smallest)
    return {label: config if own == smallest else shorter for label, own in contexts.items()}


def default_folder(model: str, weights: str) -> Path:
    """Folder for the tasks of a model, by its name and fingerprint: another model has another.

    For a run, and the export in it, it is the run's own.
    """
    path = Path(os.path.expanduser(model)).resolve()
    for run in (path, path.parent):
        if path in (run, run / STAGES["export"]) and (run / STAGES["export"]).is_dir():
            return run / STAGES["evaluate"]
    return Path(f"evaluation-{Path(model).name}-{weights[:8]}")


def _finished(file: Path, identity: Values) -> Values:
    """The existing result; raises `UserError` if it is of another model or other settings."""
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

    With solved examples (`shots`) the training split is included. Raises `UserError` if the task is
    not in `TASKS`, or a file that it needs is missing.
    """
    if name not in TASKS:
        raise UserError(
            f"{name} cannot be read from a folder; {', '.join(TASKS)} can."
            f"{nearest(name, [*SETS, *TASKS])} Leave out --task-data to take it from the hub."
        )
    files = dict[str, Path]()
    notes = list[str]()
    scored = TASKS[name].scored
    paths = [scored]
    if shots:
        paths.insert(0, f"{Path(scored).parent}/train")
    for path in paths:
        taken = {path: "", **STAND_INS.get(path, {})}
        places = ((folder / f"{each}{suffix}", each) for each in taken for suffix in SUFFIXES)
        file, source = next((place for place in places if place[0].is_file()), (None, ""))
        if file is None:
            wanted = " or ".join(f"{each}{SUFFIXES[0]}" for each in taken)
            raise UserError(
                f"{name} needs {wanted} below {folder} (also as {', '.join(SUFFIXES[1:])}), and it "
                "is not there. Put it there, or leave out --task-data to take it from the hub."
            )
        files[Path(source).name.split("_")[0]] = file.resolve()
        if taken[source]:
            notes.append(taken[source])
    return files, notes


def mark_main(scores: Sequence[Values], name: str) -> None:
    """Set `is_main` of each score: true for the one that represents the task or group `name`.

    It is the one in the paper's metric, else in `acc`, else the first; no member of a group has it.
    """
    metrics = [score["metric"] for score in scores if score["task"] == name]
    preferred = (TASKS[name].metric if name in TASKS else "", "acc", *metrics)
    main = next((metric for metric in preferred if metric in metrics), None)
    for score in scores:
        score["is_main"] = (score["task"], score["metric"]) == (name, main)


def summary_of_model(name: str, results: Iterable[Values]) -> Values:
    """The finished tasks of a model, and `averages` of its scores (see `mean_of`).

    `averages`: of each of `SETS` whose tasks are all there, in the set's metrics; and `tasks`, of
    the main scores of all tasks that have a share of right answers, if those are two or more.
    """
    tasks = {result["task"]: result for result in results}
    scores = {
        (score["task"], score["metric"]): score
        for each in tasks.values()
        for score in each["scores"]
    }
    averages = {
        label: mean_of([scores[key] for key in metrics.items()])
        for label, metrics in SETS.items()
        if scores.keys() >= {*metrics.items()}
    }
    shares = [score for score in main_scores(tasks).values() if is_share(score)]
    if len(shares) > 1:
        averages["tasks"] = mean_of(shares)
    return {"name": name, "averages": averages, "tasks": tasks}


def mean_of(scores: Sequence[Values]) -> Values:
    """Unweighted mean of scores: `value`, `stderr`, `chance` (None if a score's is unknown), `of`.

    `of` has the value of each task and metric.
    """
    values, errors = zip(*((each["value"], each["stderr"]) for each in scores), strict=True)
    stderr = None if None in errors else math.hypot(*errors) / len(errors)
    of = {f"{each['task']} {each['metric']}": each["value"] for each in scores}
    chances = [each["chance"] for each in scores if each.get("chance") is not None]
    chance = fmean(chances) if len(chances) == len(scores) else None
    return {"metric": "acc", "value": fmean(values), "stderr": stderr, "chance": chance, "of": of}


def main_scores(tasks: Mapping[str, Values]) -> dict[str, Values]:
    """The main score of each task."""
    scores = (score for task in tasks.values() for score in task["scores"])
    return {score["task"]: score for score in scores if score["is_main"]}


def is_share(score: Values) -> bool:
    """Whether a score is a share of right answers, 0 to 1."""
    name, _, _ = score["metric"].partition(",")  # a filter's name may follow
    return name in ("acc", "acc_norm", "exact_match") or name.startswith("pass@")
