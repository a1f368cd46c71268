"""Gradients of plain and sharded parameters together: norm, clipping, and where one is bad."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from dotmoe.training.optimizer import ParameterGroup
from dotmoe.training.task import local_part


def global_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Euclidean norm of all gradients, over all ranks; the same on each. Shape []."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    parts = [g for g in gradients if isinstance(g, DTensor)]
    whole = [g for g in gradients if not isinstance(g, DTensor)]
    norms = [get_total_norm(whole)] if whole else []
    if parts:
        norm = get_total_norm(parts)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


@torch.no_grad()
def clip(parameters: Sequence[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients, in place, so that their norm is `max_norm` at most.

    Args:
        parameters: Plain or DTensors.
        norm: Of all their gradients, see `global_norm`.
        max_norm: Above 0.
    """
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local_part(parameter.grad).mul_(factor)


def discard(parameters: Sequence[nn.Parameter]) -> None:
    """Forget all gradients."""
    for parameter in parameters:
        parameter.grad = None


def worst_place(groups: Sequence[ParameterGroup]) -> str:
    """Where gradients went wrong, in words; the same on all ranks, which must all ask.

    Returns:
        The first gradient that is not finite in the order of the backward pass, which runs from the
        last layer to the first; where all are finite, the largest.
    """
    places = [place for group in groups for place in _squares(group)]
    bad = [place for place in places if not math.isfinite(place[2])]
    if bad:
        name, layer, _ = max(bad, key=lambda place: place[1] or 0)
        return f"the first gradient that is not finite is that of {_named(name, layer)}"
    name, layer, _ = max(places, key=lambda place: place[2])
    return f"the largest gradient is that of {_named(name, layer)}"


def _named(name: str, layer: int | None) -> str:
    return name if layer is None else f"{name}, layer {layer}"


def _squares(group: ParameterGroup) -> Iterator[tuple[str, int | None, float]]:
    """Name, layer if there are several, and squared norm of each gradient; last name first."""
    for name, parameter in reversed(list(group.parameters.items())):
        if parameter.grad is None:
            continue
        squares = parameter.grad.double().square()
        total = squares.flatten(1).sum(dim=1) if group.stacked else squares.sum()
        whole = total.full_tensor() if isinstance(total, DTensor) else total
        if group.stacked:
            yield from ((name, layer, value) for layer, value in enumerate(whole.tolist()))
        else:
            yield name, None, whole.item()
