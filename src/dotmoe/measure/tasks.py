"""Benchmark tasks of one model or of two side by side, each kept when it is finished."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dotmoe.checkpoint_folder import EMBEDDED, fingerprint
from dotmoe.device import resolved_device
from dotmoe.errors import UserError
from dotmoe.evaluate import harness
from dotmoe.evaluate.local_tasks import LocalFiles, local_files
from dotmoe.evaluate.paper_tasks import averages, expanded, paper_shots
from dotmoe.load import resolved_dtype
from dotmoe.measure.config import MeasureConfig
from dotmoe.measure.models import named_folders
from dotmoe.run_folder import STAGES, provenance, read_json, write_json

FEWSHOT_SEED = 1234
"""The harness's own, with which solved examples are drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """One task of one model."""

    label: str
    task: str
    path: Path
    identity: dict[str, Any]
    """What must be the same for a finished result to count."""


def measure_tasks(config: MeasureConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """Run `config.benchmark.tasks`, as plain values: `model` and `against`, tasks and averages.

    A task that is finished already, of the same model with the same settings, is read and not run
    again; one that was interrupted starts anew.

    Args:
        config: What to run.
        say: Told what is done.

    Raises:
        UserError: The harness is not installed, a model, task or file is missing, a setting is out
            of range, or another result lies where one would be written.
    """
    installed = harness.require_harness()
    _require_settings(config)
    folders = named_folders(config, "tasks")
    names = expanded(config.benchmark.tasks)
    local = _local(config, names)
    plans = [
        plan
        for label, folder in folders.items()
        for plan in _plans(config, label, folder, names, local, installed)
    ]
    finished = {plan.path: found for plan in plans if (found := _finished(plan)) is not None}
    pending = [plan for plan in plans if plan.path not in finished]
    if finished:
        say(f"{len(finished)} of {len(plans)} tasks are finished already.")
    if pending:
        with harness.quiet_harness():
            for plan, result in _run(config, folders, pending, local, say):
                plan.path.parent.mkdir(parents=True, exist_ok=True)
                write_json(plan.path, result)
                finished[plan.path] = result
    return {"origin": "measured"} | {
        label: _summary(
            config, label, {p.task: finished[p.path] for p in plans if p.label == label}
        )
        for label in folders
    }


def _run(
    config: MeasureConfig,
    folders: dict[str, Path],
    pending: list[_Plan],
    local: dict[str, LocalFiles],
    say: Callable[[str], None],
) -> Any:
    device = resolved_device(config.load.device)
    with tempfile.TemporaryDirectory() as definitions:
        tasks = tuple(dict.fromkeys(plan.task for plan in pending))
        manager, data = harness.task_manager(tasks, local, Path(definitions))
        for label in dict.fromkeys(plan.label for plan in pending):
            model = harness.harness_model(
                folders[label],
                device=device,
                dtype=resolved_dtype(config.load.dtype, device),
                batch_size=config.evaluate.batch_size,
                max_length=config.benchmark.max_length,
            )
            for plan in (each for each in pending if each.label == label):
                say(f"{_name(config, label)}: {plan.task}")
                started = time.monotonic()
                run = harness.run_task(
                    model,
                    manager,
                    plan.task,
                    shots=plan.identity["shots"],
                    limit=config.benchmark.limit,
                )
                place = {
                    "name": _name(config, label),
                    "context": model.max_length,
                    "dtype": str(model.model.dtype).removeprefix("torch."),
                    "batch_size": model.batch_size,
                }
                seconds = time.monotonic() - started
                yield plan, _result(plan, run, data[plan.task], place, local, seconds)
            del model


def _result(
    plan: _Plan,
    run: harness.TaskRun,
    data: dict[str, Any],
    place: dict[str, Any],
    local: dict[str, LocalFiles],
    seconds: float,
) -> dict[str, Any]:
    notes = list(local[plan.task].notes if plan.task in local else ())
    if plan.identity["limit"] is not None:
        notes.append(f"only the first {plan.identity['limit']} questions of each task are scored")
    if run.truncated:
        notes.append(
            f"{run.truncated} of {run.requests} requests are longer than {place['context']} "
            "tokens: the harness cuts off their beginning, with solved examples in it"
        )
    return {
        "origin": "measured",
        "task": plan.task,
        **asdict(run),
        "paper_shots": paper_shots(plan.task),
        "limit": plan.identity["limit"],
        "notes": notes,
        "model": place,
        "data": data,
        "harness": {"version": plan.identity["harness"], "fewshot_seed": FEWSHOT_SEED},
        "identity": plan.identity,
        "seconds": seconds,
        "provenance": provenance(seed=FEWSHOT_SEED),
    }


def _plans(
    config: MeasureConfig,
    label: str,
    folder: Path,
    names: tuple[str, ...],
    local: dict[str, LocalFiles],
    installed: str,
) -> list[_Plan]:
    out = results_folder(config) / ("tasks" if label == "model" else "against")
    device = resolved_device(config.load.device)
    shared = {
        "model": fingerprint(folder),
        "dtype": str(resolved_dtype(config.load.dtype, device)).removeprefix("torch."),
        "limit": config.benchmark.limit,
        "max_length": config.benchmark.max_length,
        "harness": installed,
    }
    return [
        _Plan(
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


def results_folder(config: MeasureConfig) -> Path:
    """Where the results of tasks are kept."""
    if config.out is not None:
        return Path(config.out)
    run = Path(config.model)
    if (run / STAGES["export"]).is_dir():
        return run / STAGES["evaluate"]
    return Path(f"evaluation-{EMBEDDED if config.model == EMBEDDED else run.name}")


def _finished(plan: _Plan) -> dict[str, Any] | None:
    """The result that is there already.

    Raises:
        UserError: It is one of another model or with other settings.
    """
    if not plan.path.is_file():
        return None
    result = read_json(plan.path)
    stored = result.get("identity", {})
    for key, value in plan.identity.items():
        if stored.get(key) != value:
            raise UserError(
                f"{plan.path} holds a result with another {key}"
                f"{'' if key in ('model', 'data') else f' ({stored.get(key)}, not {value})'}. "
                "Choose another folder with --out, or delete that file."
            )
    return result


def _local(config: MeasureConfig, names: tuple[str, ...]) -> dict[str, LocalFiles]:
    if config.benchmark.task_data is None:
        return {}
    folder = Path(config.benchmark.task_data)
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder. Name the one that holds the tasks' data.")
    return {name: local_files(folder, name, _shots(config, name) or 0) for name in names}


def _shots(config: MeasureConfig, name: str) -> int | None:
    asked = config.benchmark.shots
    return paper_shots(name) if asked is None else asked


def _require_settings(config: MeasureConfig) -> None:
    asked = config.benchmark
    if asked.limit is not None and asked.limit < 1:
        raise UserError(f"limit is {asked.limit}. Choose 1 question or more.")
    if asked.shots is not None and asked.shots < 0:
        raise UserError(f"shots is {asked.shots}. Choose 0 or more.")


def _summary(
    config: MeasureConfig, label: str, results: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    metrics = {task: result["metrics"] for task, result in results.items()}
    return {
        "name": _name(config, label),
        "averages": averages(config.benchmark.tasks, metrics),
        "tasks": results,
    }


def _name(config: MeasureConfig, label: str) -> str:
    return config.model if label == "model" else str(config.against)
