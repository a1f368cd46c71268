"""Calls of lm-evaluation-harness: benchmark tasks with its own runner and definitions."""

import logging
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from dotmoe.common.errors import UserError, nearest, one_line, require_package
from dotmoe.common.files import Values, write_json
from dotmoe.measure.config import EvaluateConfig, in_context
from dotmoe.measure.evaluate.models import loaded
from dotmoe.measure.evaluate.programs import CodeEval
from dotmoe.models.chat import end_tokens, has_chats
from dotmoe.models.hf_config import head_dim
from dotmoe.models.sampling import Sampling, continuations

MAX_NUMBERS = 1 << 28
"""Logits, or keys and values, of one batch of requests (1 GiB in float32); one may have more."""
CPU_BATCH, GPU_BATCH = 16, 64
"""Requests scored at once: more are no faster on a CPU; on a GPU the harness tries up to this."""
CHAT_ANSWER = 1_024  # tokens: the harness ends at 256, and chat models explain for longer
SPLITS = {"train": "training_split", "validation": "validation_split", "test": "test_split"}


def require_harness() -> str:
    """Version of the installed harness; raises `UserError` if there is none."""
    for package in ("lm_eval", "accelerate"):
        require_package(package, "eval", "lm-evaluation-harness, which runs the tasks,")
    return version("lm_eval")


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Within this context, random numbers of the process may be seeded anew."""
    of_python = random.getstate()
    of_numpy = np.random.get_state()  # noqa: NPY002 - the harness seeds the numbers of the process
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


def _no_bars() -> AbstractContextManager[Any]:
    """A context in which `tqdm` shows no bars."""
    from tqdm.std import tqdm  # the harness needs it

    stock = tqdm.__init__

    def disabled(bar: Any, *given: Any, **options: Any) -> None:
        stock(bar, *given, **options | {"disable": True})

    return patch.object(tqdm, "__init__", disabled)


@contextmanager
def quiet_harness(*, shows_bars: bool) -> Iterator[None]:
    """Within this context, the harness prints nothing to stdout, and only errors are logged.

    It shows its progress bars if `shows_bars`. It seeds all random numbers of the process; these go
    on afterwards as if it had not.

    `CodeEval` runs programs that models write. Git is not asked: it complains where it has none.
    """
    import datasets

    import evaluate

    load = evaluate.load
    git = patch("lm_eval.evaluator.get_git_commit_hash", str)

    def metric(name: str, *options: Any, **named: Any) -> Any:
        return CodeEval() if name == "code_eval" else load(name, *options, **named)

    had_bars, disabled = not datasets.are_progress_bars_disabled(), logging.root.manager.disable
    datasets.disable_progress_bars()
    logging.disable(max(disabled, logging.WARNING))
    try:
        own_metric = patch.object(evaluate, "load", metric)
        bars = nullcontext() if shows_bars else _no_bars()
        with git, redirect_stdout(sys.stderr), own_metric, bars, _random_numbers_kept():
            yield
    finally:
        logging.disable(disabled)
        if had_bars:
            datasets.enable_progress_bars()


def loaded_tasks(
    names: Sequence[str], local: Mapping[str, tuple[str, Mapping[str, Path]]], sets: Sequence[str]
) -> dict[str, list[Any]]:
    """The objects that the harness runs for each name: one group, or tasks.

    A `UserError` for an unknown name also proposes `sets`, the names of sets of tasks; tasks that
    run programs of models without our limits are refused.

    `local` gives, for tasks whose rows come from files, the harness's own definition, in which
    nothing else is changed, and a file for each split. If it is empty, data come from the hub.
    """
    import lm_eval.tasks

    stock = Path(lm_eval.tasks.__file__).parent
    with TemporaryDirectory() as folder:
        for name, (definition, files) in local.items():
            changed = _definition(name, f"{stock / definition}.yaml", files)
            write_json(Path(folder) / f"{name}.yaml", changed)  # JSON is YAML
        # Reading all of the harness's own tasks takes a quarter of a minute.
        manager = lm_eval.tasks.TaskManager(include_path=folder, include_defaults=not local)
        loaded = {}
        for name in names:
            if name not in manager.all_tasks:
                raise UserError(
                    f"{name} is no task of lm-evaluation-harness."
                    f"{nearest(name, [*sets, *manager.all_tasks])} Name one that `lm_eval ls "
                    f"tasks` lists, or {' or '.join(sets)}."
                )
            try:
                found = manager.load([name])
            except Exception as error:  # definitions and data sets raise errors of any type
                why = one_line(error) or type(error).__name__
                remedy = "Check the network, or give a folder with --task-data."
                if "scripts are no longer supported" in why:
                    remedy = (
                        "The data set is a script, which the package datasets no longer runs. "
                        "Choose another task, or update lm-eval."
                    )
                if local:
                    remedy = f"Repair {' and '.join(map(str, local[name][1].values()))}."
                raise UserError(f"the data of {name} cannot be read ({why}). {remedy}") from error
            groups, tasks = found["groups"], found["tasks"].values()
            _require_limits(name, tasks)
            loaded[name] = [groups[name]] if name in groups else list(tasks)
        return loaded


def _definition(name: str, stock: str, files: Mapping[str, Path]) -> Values:
    """A task's definition: that of the file `stock`, with a file of rows for each split."""
    changed: Values = {
        "include": stock,
        "task": name,
        "tag": [],
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(path) for split, path in files.items()}},
    }
    for split, key in SPLITS.items():
        changed[key] = split if split in files else None
    if "train" not in files:
        changed["fewshot_split"] = None
    return changed


def _require_limits(name: str, tasks: Iterable[Any]) -> None:
    """Refuse tasks that run programs that models write, unless `CodeEval` runs them."""
    for task in tasks:
        metrics = getattr(task, "_metric_fn_list", {}).values()
        if getattr(task, "UNSAFE_CODE", False) and not any(map(_runs_by_code_eval, metrics)):
            raise UserError(
                f"{name} is marked by the harness as running programs that the model writes, and "
                "dotmoe runs them within limits for tasks such as HumanEval alone. Leave it out."
            )


def _runs_by_code_eval(metric: Any) -> bool:
    """Whether a metric is that of `CodeEval`, or a function of a module that loaded it."""
    owner = getattr(metric, "__self__", metric)  # the harness keeps the `__call__` of a function
    reached = [owner, *getattr(owner, "__globals__", {}).values()]
    return any(isinstance(each, CodeEval) for each in reached)


def harness_model(folder: Path, config: EvaluateConfig) -> Any:
    """The harness's own runner for the model in a folder.

    Raises `UserError` for a length beyond the context, a chat template that is missing, or if
    Transformers cannot load the model.
    """
    from lm_eval.models.huggingface import HFLM

    stock = loaded(folder, config.load)
    if config.chat_template and not has_chats(stock.tokenizer):
        raise UserError(f"{folder} has no chat template. Leave out --chat-template.")
    length = in_context("max_length", config.max_length or stock.context, stock.context)
    scored = written = config.corpus.batch_size
    if scored == "auto" and stock.model.device.type == "cpu":
        sizes = stock.model.config
        heads = getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads
        cached = 2 * sizes.num_hidden_layers * heads * head_dim(sizes)  # numbers a token
        logits_of_a_row = length * int(sizes.vocab_size)
        cached_of_a_row = min(length, 2 * CHAT_ANSWER) * cached
        scored = min(CPU_BATCH, max(1, MAX_NUMBERS // logits_of_a_row))
        written = min(Sampling().rows, max(1, MAX_NUMBERS // cached_of_a_row))

    class Runner(HFLM):
        def generate_until(self, *requests: Any, **options: Any) -> Any:
            with patch.object(self, "batch_size_per_gpu", written):
                return super().generate_until(*requests, **options)

        def _model_generate(
            self, context: Tensor, max_length: int, stop: list[str], **options: Any
        ) -> Tensor:
            penalty = config.repetition_penalty
            if options.get("do_sample") or options.get("temperature"):
                options["repetition_penalty"] = penalty
                drawn: Tensor = super()._model_generate(context, max_length, stop, **options)
                return drawn
            is_read = options["attention_mask"]
            return _continued(self, context, is_read, max_length, stop, penalty)

    if config.chat_template:
        Runner.max_gen_toks = min(CHAT_ANSWER, length // 2)
    return Runner(
        pretrained=stock.model,
        tokenizer=stock.tokenizer,
        batch_size=scored,
        max_batch_size=GPU_BATCH,
        max_length=config.max_length,
    )


def _continued(
    runner: Any,
    context_BT: Tensor,
    is_read_BT: Tensor,
    max_length: int,
    stops: list[str],
    repetition_penalty: float,
) -> Tensor:
    """Contexts with the most likely continuation up to one of some texts, as `generate` gives it.

    Rows that reach theirs leave the batch, so none waits for the longest one.
    """
    tokenizer = runner.tokenizer
    width = context_BT.shape[1]
    reach = max(map(len, stops)) + 2  # tokens: each has a character or more, but for parts of one

    def has_ended(ids: list[int]) -> bool:
        end = tokenizer.decode(ids[-reach:])
        return any(stop in end for stop in stops)

    rows = zip(context_BT.tolist(), is_read_BT.bool(), strict=True)
    prompts = [torch.tensor(row)[is_read.cpu()].tolist() for row, is_read in rows]
    greedy = Sampling(
        temperature=0.0,
        new_tokens=max_length - width,
        rows=len(prompts),
        repetition_penalty=repetition_penalty,
    )
    filled_BT = context_BT.new_full((len(prompts), max_length), tokenizer.pad_token_id)
    filled_BT[:, :width] = context_BT
    ends = end_tokens(runner.model, tokenizer)
    for made in continuations(runner.model, prompts, greedy, ends, has_ended=has_ended):
        ids = torch.tensor(made.ids, device=filled_BT.device)
        filled_BT[made.number, width : width + len(ids)] = ids
    return filled_BT


def run_tasks(
    model: Any, tasks: list[Any], shots: int | None, limit: int | None, *, as_chat: bool = False
) -> Values:
    """Run tasks, or one group of them, with the harness's own seeds.

    If `shots` is None, the task's definition sets the number of solved examples. `as_chat` asks
    through the model's chat template; solved examples are turns of the conversation before.

    Returns:
        `scores`, a row per metric of each task and group member (a filter's name after a comma);
        `versions` of the definitions; `notes`: how the scores differ from official ones.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    try:
        output = simple_evaluate(
            model=model,
            tasks=tasks,
            num_fewshot=shots,
            limit=limit,
            task_manager=TaskManager(include_defaults=False),  # tasks are loaded already
            batch_size=model.batch_size,
            apply_chat_template=as_chat,
            confirm_run_unsafe_code=True,  # by `CodeEval`: `loaded_tasks` refuses others
        )
    except AssertionError as error:  # the longest answer leaves no room for a question
        raise UserError(f"{one_line(error)} Choose another task, or a longer context.") from error
    requests = _requests(output["samples"].values(), model)
    # A token has at least one byte, except BOS and a leading blank.
    long = [(text, room) for text, room in requests if len(text.encode()) + 2 > room]
    truncated = len([text for text, room in long if len(model.tok_encode(text)) > room])
    notes = [] if limit is None else [f"only the first {limit} questions of each task are scored"]
    if as_chat:
        chat = "asked through the model's chat template, solved examples as turns of it"
        notes.append(f"{chat}; answers of up to {model.max_gen_toks:,} tokens, or the task's own")
    if truncated:
        notes.append(
            f"{truncated} of {len(requests)} requests are longer than {model.max_length} tokens, "
            "with the longest answer: the harness cuts off their beginning, examples first"
        )
    return {
        "scores": [row for task in output["results"] for row in _rows(task, output)],
        "versions": dict(output["versions"]),
        "notes": notes,
    }


def _requests(samples: Iterable[list[Values]], model: Any) -> list[tuple[str, int]]:
    """Text and room, see `_request`, of all requests whose samples these are, by task."""
    requests = list[tuple[str, int]]()
    for rows in samples:
        # There is a sample for each filter of answers, with the same requests.
        for sample in [row for row in rows if row["filter"] == rows[0]["filter"]]:
            pairs = [pair for pair in sample["arguments"] if len(pair) == 2]
            requests += [_request(text, other, model) for text, other in pairs]
    return requests


def _request(context: str, answer: str | Values, model: Any) -> tuple[str, int]:
    """Text of a request to score or to generate (`answer`: options), and tokens it may have."""
    if isinstance(answer, str):
        return f"{context}{answer}", model.max_length + 1  # the last token is only predicted
    return context, model.max_length - answer.get("max_gen_toks", model.max_gen_toks)


def _rows(task: str, output: Values) -> Iterator[Values]:
    result, counts = output["results"][task], output["n-samples"]
    members = _members(task, output)
    chance = chance_of([sample for member in members for sample in output["samples"][member]])
    for key, value in result.items():
        name, comma, filtered_by = key.partition(",")
        if comma and not name.endswith("_stderr"):
            stderr = result.get(f"{name}_stderr,{filtered_by}")
            each = [
                sample[name]
                for sample in output["samples"].get(task, ())
                if sample["filter"] == filtered_by and isinstance(sample.get(name), int | float)
            ]
            yield {
                "task": task,
                "metric": name if filtered_by == "none" else key,
                "value": float(value),
                "stderr": stderr if isinstance(stderr, float) else None,  # "N/A": none is known
                "shots": max(int(output["n-shot"].get(member, 0)) for member in members),
                "questions": sum(counts[member]["effective"] for member in members),
                "chance": chance if name in ("acc", "acc_norm") else None,
                "per_question": each or None,
            }


def _members(task: str, output: Values) -> list[str]:
    """The tasks that a task stands for: itself, or those of a group and of the groups in it."""
    if task in output["n-samples"]:
        return [task]
    inside = output["group_subtasks"][task]
    return list(dict.fromkeys(each for name in inside for each in _members(name, output)))


def chance_of(samples: Sequence[Values]) -> float | None:
    """Accuracy of uniform guessing, or of always giving the answer that is right most often.

    The larger counts; the second only if all questions have the same answers, as in BoolQ, where
    "yes" is right for 62 %. None if there is no choice.
    """
    answers = [
        [pair[1] for pair in sample["arguments"] if len(pair) == 2 and isinstance(pair[1], str)]
        for sample in samples
    ]  # without requests to generate
    if not answers or min(map(len, answers)) < 2:
        return None
    even = sum(1 / len(choices) for choices in answers) / len(answers)
    if any(choices != answers[0] for choices in answers):
        return even
    return max(even, max(Counter(str(each["target"]) for each in samples).values()) / len(samples))
