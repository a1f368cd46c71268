"""Where the metrics of each step go: a file always, TensorBoard and Weights & Biases if asked."""

import json
import math
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from dotmoe.distributed import is_first
from dotmoe.errors import UserError
from dotmoe.training.config import Destination
from dotmoe.training.task import Metrics

METRICS_FILE = "metrics.jsonl"


class Logger(Protocol):
    """Takes the metrics of one step after the other."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Write down the metrics of a step, which is counted from 1."""
        ...

    def close(self) -> None:
        """Write what is still held back."""
        ...


@contextmanager
def loggers(
    folder: Path, destinations: Sequence[Destination], steps_taken: int
) -> Iterator[Sequence[Logger]]:
    """The logs of a stage, closed at the end; none on any rank but the first.

    Args:
        folder: Of the stage; receives `metrics.jsonl`, `tensorboard/` and `wandb/`.
        destinations: Besides the file.
        steps_taken: By the checkpoint that is resumed from; what was logged of later steps is
            taken back, except from Weights & Biases, which ignores a step that it has.
    """
    with ExitStack() as stack:
        opened: list[Logger] = []
        if is_first():
            opened.append(_JsonLines(folder / METRICS_FILE, steps_taken))
            opened += [_LOGGERS[name](folder, steps_taken) for name in dict.fromkeys(destinations)]
        for logger in opened:
            stack.callback(logger.close)
        yield opened


class _JsonLines:
    """One JSON object a step. What is not finite is null, which JSON has a word for."""

    def __init__(self, path: Path, steps_taken: int) -> None:
        _cut_after(path, steps_taken)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Metrics) -> None:
        values = {name: v if math.isfinite(v) else None for name, v in metrics.items()}
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _cut_after(path: Path, steps_taken: int) -> None:
    """Drop the lines of steps that will be taken again, and one cut short by a kill."""
    if not path.exists():
        return
    kept = 0
    with path.open("rb") as file:
        for line in file:
            try:
                if json.loads(line)["step"] > steps_taken or not line.endswith(b"\n"):
                    break
            except (json.JSONDecodeError, UnicodeDecodeError, KeyError):
                break
            kept += len(line)
    os.truncate(path, kept)  # needs no room, so that a full disk loses nothing


class _TensorBoard:
    """Scalars by `torch.utils.tensorboard`."""

    def __init__(self, folder: Path, steps_taken: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(
            str(folder / "tensorboard"), purge_step=steps_taken + 1, flush_secs=10
        )

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """A run that a resumed stage goes on with; `WANDB_MODE=offline` and the like are obeyed."""

    def __init__(self, folder: Path, steps_taken: int) -> None:
        import wandb

        id_file = folder / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex, encoding="utf-8")
        try:
            self._run: Any = wandb.init(
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

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


_LOGGERS: dict[Destination, Callable[[Path, int], Logger]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
}
