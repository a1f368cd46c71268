"""Options of every training stage."""

from dataclasses import dataclass
from typing import Annotated, Literal

from dotmoe.common.options import at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Checkpoints and bad losses of every training stage; none changes what is learned."""

    checkpoint_every: Annotated[int, at_least(1)] | None = None
    """Steps between checkpoints, in addition to those half an hour after the last, at the end and
    on SIGTERM or Ctrl-C. None: only those."""
    on_bad_loss: Literal["stop", "skip"] = "stop"
    """What to do if a loss or gradient is not finite, or a loss explodes: `stop` with an error that
    names the layer and the last checkpoint, or `skip` the batch."""
    max_skipped: Annotated[int, at_least(0)] = 10
    """Maximum number of batches skipped in a row; one more stops the run."""


DEFAULT_TRAINING = TrainingConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Number of steps, warm-up, weight decay and gradient clipping of a training run."""

    steps: int
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float
