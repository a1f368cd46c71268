"""Benchmark tasks of one model or of two side by side, each kept when it is finished."""

import tempfile
import time
from pathlib import Path
from typing import Any

from dotmoe.checkpoint.folder import EMBEDDED, fingerprint
from dotmoe.distributed import resolved_device
from dotmoe.errors import UserError
from dotmoe.evaluate import harness
from dotmoe.evaluate.config import EvaluateConfig
from dotmoe.evaluate.models import named_folders
from dotmoe.evaluate.task_sets import TASKS, LocalFiles, averages, expanded, local_files
from dotmoe.files import read_json, write_json
from dotmoe.load import resolved_dtype
from dotmoe.progress import Progress
from dotmoe.provenance import provenance
from dotmoe.run_folder import STAGES

FEWSHOT_SEED = 1234
"""The harness's own, with which solved examples are drawn."""
FORM = 2
"""Of the result files; a file of another form is refused."""
SUBFOLDERS = {"model": "tasks", "against": "against"}

Values = dict[str, Any]


def measure_tasks(config: EvaluateConfig, progress: Progress) -> Values:
    """Run `config.benchmark.tasks`: of each model its `tasks`, as in their files, and `averages`.

    A task that is finished already, of the same model with the same settings, is read and not run
    again; one that was interrupted starts anew.

    Raises:
        UserError: The harness is not installed, a model, task or file is missing, a setting is out
            of range, or another result lies where one would be written.
    """
    version = harness.require_harness()
    folders, names = named_folders(config), expanded(config.benchmark.tasks)
    local = _local_files(config, names)
    identities, files, results = {}, {}, {}
    for label, folder in folders.items():
        made_with = {"form": FORM, "harness": version, "model": fingerprint(folder)}
        for name in names:
            key = label, name
            identities[key] = made_with | _settings(config, name, local.get(name))
            files[key] = results_folder(config) / SUBFOLDERS[label] / f"{name}.json"
            if files[key].is_file():
                results[key] = _finished(files[key], identities[key])
    pending = [key for key in identities if key not in results]
    if results:
        progress.log(f"{len(results)} of {len(identities)} tasks are finished already.")
    with harness.quiet_harness(), tempfile.TemporaryDirectory() as definitions:
        wanted = tuple(dict.fromkeys(name for _, name in pending))
        manager, data = harness.task_manager(wanted, local, Path(definitions))
        for label in dict.fromkeys(label for label, _ in pending):
            model = harness.harness_model(folders[label], config)
            for key in (each for each in pending if each[0] == label):
                name, identity = key[1], identities[key]
                progress.log(f"{config.names[label]}: {name}")
                result = _run(model, manager, name, identity, local.get(name))
                result["model"]["name"] = config.names[label]
                results[key] = result | {"data": data[name], "provenance": provenance(FEWSHOT_SEED)}
                files[key].parent.mkdir(parents=True, exist_ok=True)
                write_json(files[key], results[key])
            del model
    return {label: _side(config, label, results) for label in folders}


def _side(config: EvaluateConfig, label: str, results: dict[tuple[str, str], Values]) -> Values:
    tasks = {name: result for (side, name), result in sorted(results.items()) if side == label}
    scores = [score for task in tasks.values() for score in task["scores"]]
    means = averages(config.benchmark.tasks, scores)
    return {"name": config.names[label], "averages": means, "tasks": tasks}


def _run(model: Any, manager: Any, name: str, identity: Values, files: LocalFiles | None) -> Values:
    started = time.monotonic()
    limit = identity["limit"]
    found = harness.run_task(model, manager, name, shots=identity["shots"], limit=limit)
    notes = list(files.notes) if files else []
    if limit is not None:
        notes.append(f"only the first {limit} questions of each task are scored")
    if found["truncated"]:
        notes.append(
            f"{found['truncated']} of {found['requests']} requests are longer than "
            f"{model.max_length} tokens: the harness cuts off their beginning, with solved "
            "examples in it"
        )
    return {
        "origin": "measured",
        "task": name,
        "model": {
            "context": model.max_length,
            "dtype": str(model.model.dtype).removeprefix("torch."),
            "batch_size": model.batch_size,
        },
        **found,
        "limit": limit,
        "notes": notes,
        "identity": identity,
        "seconds": time.monotonic() - started,
    }


def results_folder(config: EvaluateConfig) -> Path:
    """Where the results of tasks are kept."""
    if config.out is not None:
        return Path(config.out)
    run = Path(config.model)
    if (run / STAGES["export"]).is_dir():
        return run / STAGES["evaluate"]
    return Path(f"evaluation-{EMBEDDED if config.model == EMBEDDED else run.name}")


def _settings(config: EvaluateConfig, name: str, files: LocalFiles | None) -> Values:
    """What must be the same for a finished result to count, beside the model."""
    dtype = resolved_dtype(config.load.dtype, resolved_device(config.load.device))
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "limit": config.benchmark.limit,
        "max_length": config.benchmark.max_length,
        "shots": _shots(config, name),
        "data": files.digests() if files else "hub",
    }


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


def _local_files(config: EvaluateConfig, names: tuple[str, ...]) -> dict[str, LocalFiles]:
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
