"""Options of every training stage."""

from dataclasses import dataclass
from typing import Annotated

from dotmoe.common.options import at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Checkpoints of every training stage, which do not change what is learned."""

    checkpoint_every: Annotated[int, at_least(1)] | None = None
    """Steps between checkpoints, in addition to those half an hour after the last, at the end and
    on SIGTERM, Ctrl-C or a closed terminal. None: only those."""


DEFAULT_TRAINING = TrainingConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Number of steps, warm-up, weight decay and gradient clipping of a training run."""

    steps: int
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float
