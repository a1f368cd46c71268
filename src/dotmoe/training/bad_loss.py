"""Losses that are not finite or explode, and how many batches have been skipped for them."""

import math
from collections import deque
from statistics import median
from typing import Any

from dotmoe.training.config import TrainingConfig
from dotmoe.training.task import Metrics

_WINDOW = 64
_ENOUGH = 8


class LossWatch:
    """Judges the metrics of each step by those of the steps before it.

    A loss explodes where it is above every loss accepted so far and above `max_loss_ratio` times
    the median of the last 64; of the first 8 nothing but finiteness is asked. The first condition
    keeps the ordinary spikes of a loss near 0 from counting, and single ones hardly move a median.
    """

    def __init__(self, training: TrainingConfig) -> None:
        self._ratio = training.max_loss_ratio
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._largest = -math.inf
        self.skipped = 0
        """Batches skipped so far."""
        self.skipped_in_a_row = 0

    def trouble_in(self, metrics: Metrics) -> str | None:
        """What is wrong with a step's metrics; None where nothing is."""
        for name, value in metrics.items():
            if not math.isfinite(value):
                return f"{name} is {value}"
        loss = metrics["loss"]
        if len(self._recent) < _ENOUGH or loss <= self._largest:
            return None
        usual = median(self._recent)
        if loss - usual <= (self._ratio - 1) * abs(usual):
            return None
        count = len(self._recent)
        return f"loss is {loss:.4g}, where the median of the last {count} is {usual:.4g},"

    def accept(self, loss: float) -> None:
        """Remember the loss of a step that was applied."""
        self._recent.append(loss)
        self._largest = max(self._largest, loss)
        self.skipped_in_a_row = 0

    def skip(self) -> None:
        """Count a batch that was not applied."""
        self.skipped += 1
        self.skipped_in_a_row += 1

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, as plain values."""
        return {
            "recent": list(self._recent),
            "largest": self._largest,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Inverse of `state`."""
        self._recent.extend(state["recent"])
        self._largest = state["largest"]
        self.skipped = state["skipped"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
