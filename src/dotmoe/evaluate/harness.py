"""Benchmark tasks by lm-evaluation-harness: the one place that calls it.

The model is the harness's own Hugging Face runner on a folder that stock Transformers loads, and a
task is the harness's own definition. What is added: local data, and a record that says everything.
"""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from dotmoe.checkpoint_folder import one_line
from dotmoe.errors import UserError
from dotmoe.evaluate.local_tasks import LOCAL_TASKS, LocalFiles, write_definition
from dotmoe.evaluate.paper_tasks import require_known
from dotmoe.evaluate.perplexity import MAX_LOGITS

CPU_BATCH = 16
"""Requests a forward pass on a CPU, where more of them at once are no faster."""

GPU_BATCH = 64
"""Where the harness starts to look for the largest batch that a GPU has room for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRun:
    """What the harness says of one task or group of tasks."""

    metrics: dict[str, float]
    """Every metric; a filter's name follows after a comma. Empty for a bare list of tasks."""
    stderr: dict[str, float | None]
    """Standard error of each; None where the harness gives none."""
    parts: dict[str, dict[str, float]]
    """Metrics of the members of a group, by their names."""
    shots: dict[str, int]
    """Solved examples before each question, by task."""
    samples: dict[str, dict[str, int]]
    """Questions scored (`effective`) of all that there are (`original`), by task."""
    versions: dict[str, Any]
    """Of each task's definition."""
    requests: int
    """Texts scored."""
    truncated: int
    """Requests that were longer than the context: their beginning was cut off."""


def require_harness() -> str:
    """Version of the installed harness.

    Raises:
        UserError: It is not installed.
    """
    if find_spec("lm_eval") is None or find_spec("accelerate") is None:
        raise UserError(
            "lm-evaluation-harness is not installed, and it runs the tasks. "
            "Run pip install 'dotmoe[eval]'."
        )
    return version("lm_eval")


@contextmanager
def quiet_harness() -> Iterator[None]:
    """Inside, the harness prints nothing to standard output and warns of nothing."""
    import datasets

    loggers = [logging.getLogger("lm_eval"), logging.getLogger("datasets")]
    levels = [logger.level for logger in loggers]
    had_bars = datasets.utils.logging.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if had_bars:
            datasets.enable_progress_bars()


def task_manager(
    names: Sequence[str], local: dict[str, LocalFiles], definitions: Path
) -> tuple[Any, dict[str, dict[str, Any]]]:
    """The harness's tasks, loaded once so that missing data shows before a model is read.

    Args:
        names: Tasks that will be run.
        local: Local files of all the tasks; none: they come from the hub.
        definitions: Empty folder for the definitions of local tasks; kept while they are run.

    Returns:
        A `TaskManager`, and for each name what its tasks' data are.

    Raises:
        UserError: A name that the harness does not know, or data that cannot be read.
    """
    manager = _local_manager(local, definitions) if local else _stock_manager()
    require_known(names, manager.all_tasks)
    data: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            loaded = manager.load([name])["tasks"]
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            raise UserError(
                f"the data of {name} cannot be read ({one_line(error)}). Check the network, or "
                "give a folder with --task-data."
            ) from error
        data[name] = {each: _data_of(task, local.get(each)) for each, task in loaded.items()}
    return manager, data


@cache
def _stock_manager() -> Any:
    """All of the harness's own tasks; reading them takes a quarter of a minute."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _local_manager(local: dict[str, LocalFiles], definitions: Path) -> Any:
    """Only the tasks with local data, which takes no time."""
    import lm_eval.tasks

    stock = Path(lm_eval.tasks.__file__).parent
    for task, files in local.items():
        write_definition(definitions, task, stock / LOCAL_TASKS[task].definition, files)
    return lm_eval.tasks.TaskManager(include_path=str(definitions), include_defaults=False)


def _data_of(task: Any, files: LocalFiles | None) -> dict[str, Any]:
    config = task.config
    scored = config.test_split or config.validation_split
    fewshot = config.fewshot_split or config.training_split or config.validation_split or scored
    rows = {split: task.dataset[split].num_rows for split in {scored, fewshot} if split}
    source: dict[str, Any] = (
        {"source": "hub", "dataset": config.dataset_path, "name": config.dataset_name}
        if files is None
        else {"source": "local", "files": files.digests()}
    )
    return source | {"scored_split": scored, "fewshot_split": fewshot, "rows": rows}


def harness_model(
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype | Literal["auto"],
    batch_size: int | Literal["auto"],
    max_length: int | None,
) -> Any:
    """The harness's own runner of a Hugging Face folder.

    Args:
        folder: Dense or exported checkpoint.
        device: Where it runs.
        dtype: Number format of its weights.
        batch_size: Requests a forward pass. auto: on a GPU the harness finds the largest that fits;
            on a CPU 16, fewer where context times vocabulary is large.
        max_length: Tokens that the model may see at once. None: its context.

    Raises:
        UserError: `max_length` or `batch_size` out of range.
    """
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    context = int(config.max_position_embeddings)
    if max_length is not None and not 2 <= max_length <= context:
        raise UserError(
            f"max_length is {max_length}, but must lie in 2 to {context}, the model's context. "
            "Choose one."
        )
    if batch_size != "auto" and batch_size < 1:
        raise UserError(f"batch_size is {batch_size}. Choose 1 or more, or auto.")
    fits = max(1, MAX_LOGITS // ((max_length or context) * int(config.vocab_size)))
    if batch_size == "auto" and device.type == "cpu":
        batch_size = min(CPU_BATCH, fits)
    return HFLM(
        pretrained=str(folder),
        device=str(device),
        dtype=dtype,
        batch_size=batch_size,
        max_batch_size=GPU_BATCH,
        max_length=max_length,
    )


def run_task(
    model: Any, manager: Any, name: str, *, shots: int | None, limit: int | None
) -> TaskRun:
    """Run one task, or one group of tasks, with the harness's own seeds.

    Args:
        model: See `harness_model`.
        manager: See `task_manager`.
        name: Task, group or tag.
        shots: Solved examples before each question. None: as the task's definition says.
        limit: Score only the first questions of each task. None: all.
    """
    from lm_eval import simple_evaluate

    found = simple_evaluate(
        model=model,
        tasks=[name],
        num_fewshot=shots,
        limit=limit,
        task_manager=manager,
        batch_size=model.batch_size,
        log_samples=True,
    )
    metrics = {task: _metrics(values)[0] for task, values in found["results"].items()}
    requests, truncated = _truncated(model, found["samples"])
    return TaskRun(
        metrics=metrics.get(name, {}),
        stderr=_metrics(found["results"].get(name, {}))[1],
        parts={task: values for task, values in metrics.items() if task != name},
        shots={task: int(count) for task, count in found["n-shot"].items()},
        samples={task: dict(counts) for task, counts in found["n-samples"].items()},
        versions=dict(found["versions"]),
        requests=requests,
        truncated=truncated,
    )


def _metrics(values: dict[str, Any]) -> tuple[dict[str, float], dict[str, float | None]]:
    """`acc,none` and `acc_stderr,none` of the harness, taken apart."""
    metrics: dict[str, float] = {}
    errors: dict[str, float | None] = {}
    for key, value in values.items():
        name, comma, filtered_by = key.partition(",")
        if not comma:
            continue
        end = "" if filtered_by == "none" else f",{filtered_by}"
        if name.endswith("_stderr"):
            is_number = isinstance(value, int | float)
            errors[name.removesuffix("_stderr") + end] = float(value) if is_number else None
        else:
            metrics[name + end] = float(value)
    return metrics, errors


def _truncated(model: Any, samples: dict[str, list[dict[str, Any]]]) -> tuple[int, int]:
    """Number of scored texts, and of those that are longer than what the model may see.

    The harness keeps the last `max_length` + 1 tokens, of which the last is only predicted.
    """
    room = model.max_length + 1
    requests = truncated = 0
    for sample in (sample for rows in samples.values() for sample in rows):
        for arguments in sample["arguments"]:
            texts = [text for text in arguments if isinstance(text, str)]
            if len(texts) != 2:
                continue  # generation, or a rolling window, which cuts nothing off
            requests += 1
            text = "".join(texts)
            if len(text.encode()) + 2 > room:  # a token has a byte or more, but for BOS and blank
                truncated += len(model.tok_encode(text)) > room
    return requests, truncated
