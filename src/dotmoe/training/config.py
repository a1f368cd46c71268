"""How a training run is kept safe and watched; nothing here changes what is learned."""

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from dotmoe.errors import UserError

Destination = Literal["tensorboard", "wandb"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Checkpoints, bad values and logs of every training stage."""

    checkpoint_every: int = 100
    """Steps between checkpoints."""
    checkpoint_minutes: float = 30.0
    """Minutes between checkpoints, where steps are so long that these pass first."""
    keep_checkpoints: int = 2
    """Checkpoints that are kept; an older one goes when a newer one is whole on disk."""
    on_bad_loss: Literal["stop", "skip"] = "stop"
    """Where a loss or gradient is not finite, or a loss explodes: `stop`, naming the layer and the
    last checkpoint, or `skip` the batch."""
    max_loss_ratio: float = 10.0
    """A loss explodes where it is above every loss before it and above this many times the median
    of the last 64; `inf`: never."""
    max_skipped: int = 10
    """Batches skipped in a row at most; one more stops the run."""
    log_to: tuple[Destination, ...] = ()
    """Besides `metrics.jsonl`: `tensorboard`, `wandb`, or both."""

    def check(self) -> None:
        """Refuse numbers that no run can use, and logs whose package is not there.

        Raises:
            UserError: A number out of its range, or a package that is not installed.
        """
        for package in self.log_to:
            if find_spec(package) is None:
                raise UserError(
                    f"log_to names {package}, which is not installed. Install it by "
                    f"`pip install 'dotmoe[{package}]'`, or leave --log-to {package} out."
                )
        for name in ("checkpoint_every", "keep_checkpoints"):
            _require(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        _require("max_skipped", self.max_skipped, self.max_skipped >= 0, "at least 0")
        minutes, ratio = self.checkpoint_minutes, self.max_loss_ratio
        _require("checkpoint_minutes", minutes, minutes > 0, "above 0")
        _require("max_loss_ratio", ratio, ratio > 1, "above 1")


DEFAULT_TRAINING = TrainingConfig()


def _require(name: str, value: float, allowed: bool, rule: str) -> None:
    if not allowed or math.isnan(value):
        raise UserError(f"{name} is {value}, but it must be {rule}. Choose such a number.")
