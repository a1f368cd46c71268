"""AdamW groups and the learning-rate schedule."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """Parameters that share a peak learning rate."""

    name: str
    parameters: Mapping[str, nn.Parameter]
    """By name, in order. Names differ between groups, and stay the same over runs and numbers of
    ranks: checkpoints go by them. Plain tensors are equal on all ranks; others are DTensors."""
    lr: float
    """Peak learning rate."""
    stacked: bool = False
    """The first dimension counts layers, so that a message can name one."""


def adamw(groups: Sequence[ParameterGroup], *, weight_decay: float) -> torch.optim.AdamW:
    """AdamW over named groups; each remembers its peak rate as `peak_lr`."""
    return torch.optim.AdamW(
        [
            {"params": list(g.parameters.values()), "lr": g.lr, "peak_lr": g.lr, "name": g.name}
            for g in groups
        ],
        weight_decay=weight_decay,
    )


def cosine_with_warmup(step: int, *, total_steps: int, warmup_steps: int) -> float:
    """Factor on the peak rate: linear from 1/warmup to 1, then half a cosine to 0.

    Args:
        step: 0 to total_steps - 1.
        total_steps: Optimizer steps of the run.
        warmup_steps: Steps of the linear part; may be 0.

    Example:
        >>> [round(cosine_with_warmup(s, total_steps=4, warmup_steps=2), 2) for s in range(4)]
        [0.5, 1.0, 1.0, 0.5]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group to its peak rate times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor


MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter."""


def empty_moments(parameter: nn.Parameter) -> dict[str, Tensor]:
    """AdamW's state of a parameter before its first step, laid out as the parameter is."""
    count, mean, mean_square = MOMENTS
    return {
        count: torch.tensor(0.0),
        mean: torch.zeros_like(parameter, requires_grad=False),
        mean_square: torch.zeros_like(parameter, requires_grad=False),
    }
