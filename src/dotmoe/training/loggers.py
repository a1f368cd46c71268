"""Where the metrics of each step go: a file always, TensorBoard and Weights & Biases if asked."""

import json
import math
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from dotmoe.distributed import is_rank_zero
from dotmoe.errors import UserError

Metrics = dict[str, float]
Destination = Literal["tensorboard", "wandb"]
Log = Callable[[int, Metrics], None]
"""Takes the number of a step, which is counted from 1, and its metrics."""


@contextmanager
def loggers(folder: Path, destinations: Sequence[Destination], steps_taken: int) -> Iterator[Log]:
    """One function that writes into all logs of a stage; on ranks other than 0 it does nothing.

    The folder receives `metrics.jsonl` and the destinations' own. What was logged after the steps
    taken, by the checkpoint that is resumed from, is removed, except from Weights & Biases, which
    ignores a step that it has.
    """
    kinds = {"file": _json_lines, "tensorboard": _tensorboard, "wandb": _weights_and_biases}
    wanted = ("file", *dict.fromkeys(destinations)) if is_rank_zero() else ()
    with ExitStack() as stack:
        logs = [stack.enter_context(kinds[name](folder, steps_taken)) for name in wanted]

        def log_to_all(step: int, metrics: Metrics) -> None:
            for log in logs:
                log(step, metrics)

        yield log_to_all


@contextmanager
def _json_lines(folder: Path, steps_taken: int) -> Iterator[Log]:
    """One JSON object a step. What is not finite is null, which JSON has a word for."""
    path = folder / "metrics.jsonl"
    if path.exists():
        _cut_after(path, steps_taken)
    with path.open("a", encoding="utf-8") as file:

        def log(step: int, metrics: Metrics) -> None:
            values = {name: v if math.isfinite(v) else None for name, v in metrics.items()}
            file.write(json.dumps({"step": step, **values}) + "\n")
            file.flush()

        yield log


def _cut_after(path: Path, steps_taken: int) -> None:
    """Drop the lines of steps that will be taken again, and one cut short by a kill."""
    kept = 0
    with path.open("rb") as file:
        for line in file:
            try:
                if json.loads(line)["step"] > steps_taken or not line.endswith(b"\n"):
                    break
            except (ValueError, KeyError):
                break
            kept += len(line)
    os.truncate(path, kept)  # needs no room, so that a full disk loses nothing


@contextmanager
def _tensorboard(folder: Path, steps_taken: int) -> Iterator[Log]:
    from torch.utils.tensorboard import SummaryWriter

    where = str(folder / "tensorboard")
    with SummaryWriter(where, purge_step=steps_taken + 1, flush_secs=10) as writer:

        def log(step: int, metrics: Metrics) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)

        yield log


@contextmanager
def _weights_and_biases(folder: Path, steps_taken: int) -> Iterator[Log]:
    """A run that a resumed stage goes on with; `WANDB_MODE=offline` and the like are obeyed."""
    import wandb

    id_file = folder / "wandb_id"
    if not id_file.exists():
        id_file.write_text(uuid.uuid4().hex, encoding="utf-8")
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "dotmoe"),
            name=f"{folder.resolve().parent.name}/{folder.name}",
            id=id_file.read_text(encoding="utf-8"),
            dir=str(folder),
            resume="allow",
        )
    except wandb.errors.Error as error:
        raise UserError(
            f"Weights & Biases cannot start ({error}). Log in with wandb login, set "
            "WANDB_MODE=offline, or leave --log-to wandb out."
        ) from error
    try:
        yield lambda step, metrics: run.log(metrics, step=step)
    finally:
        run.finish()
