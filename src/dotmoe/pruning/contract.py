"""The contract of a method that prunes."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from dotmoe.models.dense import DenseModel
from dotmoe.parameters import num_parameters
from dotmoe.progress import Update, no_update


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneInputs:
    """What every method gets: the same model, tokens and budget."""

    dense: DenseModel
    """In memory; the method changes it, without gradients unless it turns them on."""
    tokens_BT: Int[Tensor, "B T"]
    """Calibration text, int64."""
    wanted: int
    """Parameters that are to work on one token, counted as `ParameterCounts.active`."""
    batch: Callable[[int], Int[Tensor, "B T"]]
    """Training text of a step, for a method that is trained; so are the next two."""
    steps: int = 0
    seed: int = 0
    on_progress: Update = no_update
    log: Callable[[str], None] = lambda text: None
    """Shows a line."""

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return self.dense.family.layers(self.dense.model)

    @property
    def excess(self) -> int:
        """Parameters to remove."""
        return num_parameters(self.dense.model) - self.wanted


class Pruned(NamedTuple):
    """What a method took out of the model that it was given."""

    removed: int
    """Parameters that work on no token any more, by the plan: a zero may be there by chance."""
    plan: dict[str, Any]
    """What was removed, as JSON values."""
    config: dict[str, Any] | None = None
    """What has another value in the config of the checkpoint."""
    tensors: dict[str, Tensor] | None = None
    """What is kept in place of a checkpoint, where none can hold the result."""
    tokens: int | None = None
    """That were read, if not those of calibration."""


def threshold(scores: Iterable[Tensor], removed: Callable[[float], int], most: int) -> float:
    """The highest score such that, without it and all below it, at most so many parameters go."""
    order = torch.cat(list(scores)).sort().values.tolist()
    number = bisect_right(order, most, key=removed)
    return float(order[number - 1]) if number else -math.inf
