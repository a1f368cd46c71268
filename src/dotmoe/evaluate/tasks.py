"""Benchmark tasks of one model or of two side by side, each kept when it is finished."""

import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dotmoe.checkpoint_folder import EMBEDDED, fingerprint
from dotmoe.device import resolved_device
from dotmoe.errors import UserError
from dotmoe.evaluate import harness
from dotmoe.evaluate.config import EvaluateConfig
from dotmoe.evaluate.models import named_folders
from dotmoe.evaluate.task_sets import TASKS, LocalFiles, averages, expanded, local_files
from dotmoe.files import read_json, write_json
from dotmoe.load import resolved_dtype
from dotmoe.progress import Progress
from dotmoe.run_folder import STAGES, provenance

FEWSHOT_SEED = 1234
"""The harness's own, with which solved examples are drawn."""

FORM = 2
"""Of the result files; a file of another form is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """One task of one model."""

    label: str
    task: str
    path: Path
    identity: dict[str, Any]
    """What must be the same for a finished result to count."""


def measure_tasks(config: EvaluateConfig, progress: Progress) -> dict[str, Any]:
    """Run `config.benchmark.tasks`: of each model its `tasks`, as in their files, and `averages`.

    A task that is finished already, of the same model with the same settings, is read and not run
    again; one that was interrupted starts anew.

    Raises:
        UserError: The harness is not installed, a model, task or file is missing, a setting is out
            of range, or another result lies where one would be written.
    """
    installed = harness.require_harness()
    folders = named_folders(config)
    names = expanded(config.benchmark.tasks)
    local = _local(config, names)
    runs = [
        run
        for label, folder in folders.items()
        for run in _runs(config, label, folder, names, local, installed)
    ]
    finished = {run.path: found for run in runs if (found := _finished(run)) is not None}
    pending = [run for run in runs if run.path not in finished]
    if finished:
        progress.log(f"{len(finished)} of {len(runs)} tasks are finished already.")
    if pending:
        with harness.quiet_harness():
            for run, result in _results(config, folders, pending, local, progress):
                run.path.parent.mkdir(parents=True, exist_ok=True)
                write_json(run.path, result)
                finished[run.path] = result
    sides: dict[str, Any] = {}
    for label in folders:
        tasks = {run.task: finished[run.path] for run in runs if run.label == label}
        scores = [score for task in tasks.values() for score in task["scores"]]
        sides[label] = {
            "name": config.names[label],
            "averages": averages(config.benchmark.tasks, scores),
            "tasks": tasks,
        }
    return sides | {"asked": list(config.benchmark.tasks)}


def _results(
    config: EvaluateConfig,
    folders: Mapping[str, Path],
    pending: list[_Run],
    local: Mapping[str, LocalFiles],
    progress: Progress,
) -> Iterator[tuple[_Run, dict[str, Any]]]:
    """Results of the tasks that are not finished, one after the other."""
    device = resolved_device(config.load.device)
    limit = config.benchmark.limit
    with tempfile.TemporaryDirectory() as definitions:
        tasks = tuple(dict.fromkeys(run.task for run in pending))
        manager, data = harness.task_manager(tasks, local, Path(definitions))
        for label in dict.fromkeys(run.label for run in pending):
            model = harness.harness_model(
                folders[label],
                device=device,
                dtype=resolved_dtype(config.load.dtype, device),
                batch_size=config.corpus.batch_size,
                max_length=config.benchmark.max_length,
            )
            for run in (each for each in pending if each.label == label):
                progress.log(f"{config.names[label]}: {run.task}")
                started = time.monotonic()
                found = harness.run_task(
                    model, manager, run.task, shots=run.identity["shots"], limit=limit
                )
                files = local.get(run.task)
                notes = list(files.notes) if files else []
                if limit is not None:
                    notes.append(f"only the first {limit} questions of each task are scored")
                if found["truncated"]:
                    notes.append(
                        f"{found['truncated']} of {found['requests']} requests are longer than "
                        f"{model.max_length} tokens: the harness cuts off their beginning, with "
                        "solved examples in it"
                    )
                yield (
                    run,
                    {
                        "origin": "measured",
                        "task": run.task,
                        "model": {
                            "name": config.names[label],
                            "context": model.max_length,
                            "dtype": str(model.model.dtype).removeprefix("torch."),
                            "batch_size": model.batch_size,
                        },
                        **found,
                        "limit": limit,
                        "notes": notes,
                        "data": data[run.task],
                        "fewshot_seed": FEWSHOT_SEED,
                        "identity": run.identity,
                        "seconds": time.monotonic() - started,
                        "provenance": provenance(seed=FEWSHOT_SEED),
                    },
                )
            del model


def _runs(
    config: EvaluateConfig,
    label: str,
    folder: Path,
    names: tuple[str, ...],
    local: Mapping[str, LocalFiles],
    installed: str,
) -> list[_Run]:
    out = results_folder(config) / ("tasks" if label == "model" else "against")
    device = resolved_device(config.load.device)
    shared = {
        "form": FORM,
        "model": fingerprint(folder),
        "dtype": str(resolved_dtype(config.load.dtype, device)).removeprefix("torch."),
        "limit": config.benchmark.limit,
        "max_length": config.benchmark.max_length,
        "harness": installed,
    }
    return [
        _Run(
            label=label,
            task=name,
            path=out / f"{name}.json",
            identity={
                **shared,
                "shots": _shots(config, name),
                "data": local[name].digests() if name in local else "hub",
            },
        )
        for name in names
    ]


def results_folder(config: EvaluateConfig) -> Path:
    """Where the results of tasks are kept."""
    if config.out is not None:
        return Path(config.out)
    run = Path(config.model)
    if (run / STAGES["export"]).is_dir():
        return run / STAGES["evaluate"]
    return Path(f"evaluation-{EMBEDDED if config.model == EMBEDDED else run.name}")


def _finished(run: _Run) -> dict[str, Any] | None:
    """The result that is there already.

    Raises:
        UserError: It is one of another model or with other settings.
    """
    if not run.path.is_file():
        return None
    result = read_json(run.path)
    stored = result.get("identity", {})
    for key, value in run.identity.items():
        if stored.get(key) != value:
            raise UserError(
                f"{run.path} holds a result with another {key}"
                f"{'' if key in ('model', 'data') else f' ({stored.get(key)}, not {value})'}. "
                "Choose another folder with --out, or delete that file."
            )
    return result


def _local(config: EvaluateConfig, names: tuple[str, ...]) -> dict[str, LocalFiles]:
    if config.benchmark.task_data is None:
        return {}
    folder = Path(config.benchmark.task_data)
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder. Name the one that holds the tasks' data.")
    return {name: local_files(folder, name, _shots(config, name) or 0) for name in names}


def _shots(config: EvaluateConfig, name: str) -> int | None:
    """Solved examples of a task: those asked for, else the paper's, else None."""
    paper = TASKS[name].shots if name in TASKS else None
    return paper if config.benchmark.shots is None else config.benchmark.shots
