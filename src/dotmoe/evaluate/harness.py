"""Benchmark tasks by lm-evaluation-harness, its own runner and definitions: what calls it."""

import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from dotmoe.distributed import resolved_device
from dotmoe.errors import UserError, one_line
from dotmoe.evaluate.config import EvaluateConfig
from dotmoe.evaluate.task_sets import (
    TASKS,
    LocalFiles,
    main_metric,
    require_known,
    sets_with,
)
from dotmoe.files import write_json
from dotmoe.load import resolved_dtype

MAX_LOGITS = 1 << 28
"""Logits of one forward pass, unless one request alone has more: 1 GiB in float32."""

CPU_BATCH = 16
"""Requests a forward pass on a CPU, where more of them at once are no faster."""

GPU_BATCH = 64
"""Where the harness starts to look for the largest batch that a GPU has room for."""

Values = dict[str, Any]


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
    """Inside, the harness prints nothing to standard output, and only errors are logged."""
    import datasets

    datasets.disable_progress_bars()
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(logging.NOTSET)
        datasets.enable_progress_bars()


def task_manager(
    names: Sequence[str], local: Mapping[str, LocalFiles], definitions: Path
) -> tuple[Any, dict[str, Values]]:
    """The harness's manager of tasks, and for each name what its tasks' data are.

    Tasks are loaded here, so that missing data shows before a model is read. Without `local` files
    data come from the hub; `definitions` is an empty folder that is kept while tasks are run.

    Raises:
        UserError: A name that the harness does not know, or data that cannot be read.
    """
    if not names:
        return None, {}
    import lm_eval.tasks

    stock = Path(lm_eval.tasks.__file__).parent
    for task, files in local.items():
        definition = {"include": f"{stock / TASKS[task].definition}.yaml", "task": task, "tag": []}
        write_json(definitions / f"{task}.yaml", definition | files.override())  # JSON is YAML
    # Reading all of the harness's own tasks takes a quarter of a minute.
    options = {"include_path": str(definitions), "include_defaults": False} if local else {}
    manager = lm_eval.tasks.TaskManager(**options)
    require_known(names, manager.all_tasks)
    data: dict[str, Values] = {}
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


def _data_of(task: Any, files: LocalFiles | None) -> Values:
    config = task.config
    scored = config.test_split or config.validation_split
    fewshot = config.fewshot_split or config.training_split or config.validation_split or scored
    hub = {"source": "hub", "dataset": config.dataset_path, "name": config.dataset_name}
    return {
        **(hub if files is None else {"source": "local", "files": files.digests()}),
        "scored_split": scored,
        "fewshot_split": fewshot,
        "rows": {split: task.dataset[split].num_rows for split in {scored, fewshot} if split},
    }


def harness_model(folder: Path, config: EvaluateConfig) -> Any:
    """The harness's own runner of a Hugging Face folder; `UserError` beyond its context."""
    from lm_eval.models.huggingface import HFLM

    device = resolved_device(config.load.device)
    model = AutoConfig.from_pretrained(folder, local_files_only=True)
    context = int(model.max_position_embeddings)
    max_length, batch_size = config.benchmark.max_length, config.corpus.batch_size
    if max_length is not None and max_length > context:
        raise UserError(
            f"max_length is {max_length}, but must lie in 2 to {context}, the model's context. "
            "Choose one."
        )
    if batch_size == "auto" and device.type == "cpu":
        fits = MAX_LOGITS // ((max_length or context) * int(model.vocab_size))
        batch_size = min(CPU_BATCH, max(1, fits))
    return HFLM(
        pretrained=str(folder),
        device=str(device),
        dtype=resolved_dtype(config.load.dtype, device),
        batch_size=batch_size,
        max_batch_size=GPU_BATCH,
        max_length=max_length,
    )


def run_task(
    model: Any, manager: Any, name: str, *, shots: int | None, limit: int | None
) -> Values:
    """Run one task, or one group of tasks, with the harness's own seeds.

    Without `shots` there are as many solved examples as the task's definition says.

    Returns:
        `scores`: a row for each metric of the task and of the members of a group, see `_rows`.
        `versions` of the definitions. `requests`: texts scored. `truncated`: those longer than the
        context, whose beginning was cut off.
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
    requests, truncated = _truncated(model, found["samples"])
    return {
        "scores": [row for task in found["results"] for row in _rows(task, found, name)],
        "versions": dict(found["versions"]),
        "requests": requests,
        "truncated": truncated,
    }


def _rows(task: str, found: Values, asked: str) -> list[Values]:
    """One row a metric of a task: `task`, `metric` (a filter's name after a comma), `is_main`,
    `sets` that have it as a column, `value`, `stderr`, `shots`, `questions` scored, `all_questions`
    and `chance`, see `chance_of`. Members of a group that was asked for have no main metric.
    """
    values: dict[str, dict[bool, float]] = {}
    for key, value in found["results"][task].items():
        name, comma, filtered_by = key.partition(",")
        if comma and isinstance(value, int | float):  # "N/A": no error is known
            metric = name.removesuffix("_stderr")
            metric += "" if filtered_by == "none" else f",{filtered_by}"
            values.setdefault(metric, {})[name.endswith("_stderr")] = float(value)
    # Of a group, everything is that of its members.
    members = [task] if task in found["n-samples"] else list(found["n-samples"])
    counts = [found["n-samples"][member] for member in members]
    chance = chance_of([sample for member in members for sample in found["samples"][member]])
    return [
        {
            "task": task,
            "metric": metric,
            "is_main": task == asked and metric == main_metric(task, list(values)),
            "sets": sets_with(task, metric) if task == asked else [],
            "value": value[False],
            "stderr": value.get(True),
            "shots": max((int(found["n-shot"].get(member, 0)) for member in members), default=0),
            "questions": sum(count["effective"] for count in counts),
            "all_questions": sum(count["original"] for count in counts),
            "chance": chance if metric in ("acc", "acc_norm") else None,
        }
        for metric, value in values.items()
    ]


def chance_of(samples: Sequence[Values]) -> float | None:
    """Accuracy without knowing anything: of guessing evenly among a question's answers, or of
    always giving the answer that is right most often, whichever is larger.

    All questions of BoolQ have the answers "yes" and "no", and always "yes" is right for 62 %.
    Where answers differ from question to question only guessing counts. None without a choice.
    """
    answers = [[texts[1] for texts in _texts(each) if len(texts) == 2] for each in samples]
    if not answers or min(map(len, answers)) < 2:
        return None
    even = sum(1 / len(choices) for choices in answers) / len(answers)
    if any(choices != answers[0] for choices in answers):
        return even
    right = Counter(str(each["target"]) for each in samples)
    return max(even, max(right.values()) / len(samples))


def _texts(sample: Values) -> Iterator[list[str]]:
    """Texts of each request of a question: two where an answer is scored after its context."""
    for arguments in sample["arguments"]:
        yield [text for text in arguments if isinstance(text, str)]


def _truncated(model: Any, samples: Mapping[str, Sequence[Values]]) -> tuple[int, int]:
    """Number of scored texts, and of those that are longer than what the model may see."""
    room = model.max_length + 1  # the last token is only predicted
    each = (texts for rows in samples.values() for sample in rows for texts in _texts(sample))
    requests = ["".join(texts) for texts in each if len(texts) == 2]
    # A token has a byte or more, but for BOS and blank.
    long = [text for text in requests if len(text.encode()) + 2 > room]
    return len(requests), sum(len(model.tok_encode(text)) > room for text in long)
