"""The Triton kernels of the masks against PyTorch's operations, eager and compiled.

All three run the same function of the package, so they do the same work. A kernel stays in the
package if it saves 5 % of an alignment step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dotmoe.analyse.overhead import Clock
from dotmoe.moe import masked, router
from rounds import in_turns, medians

Inputs = tuple[tuple[Tensor, ...], tuple[Any, ...]]
"""Tensors that need gradients, and the other arguments."""


def activation_inputs(tokens: int, neurons: int, experts: int, device: torch.device) -> Inputs:
    """Random inputs of `masked_activation`: bfloat16, a quarter of the experts active."""
    sizes = ((tokens, neurons),) * 2
    gate, up = (torch.randn(size, device=device, dtype=torch.bfloat16) for size in sizes)
    routing = (torch.rand(tokens, experts, device=device) < 0.25).float()
    of_neuron = torch.arange(experts, device=device).repeat_interleave(neurons // experts)
    of_neuron = of_neuron[torch.randperm(neurons, device=device)]
    return (gate, up, routing), (of_neuron,)


def soft_inputs(tokens: int, neurons: int, experts: int, device: torch.device) -> Inputs:
    """Random inputs of `soft_top_k`."""
    return (2.5 * torch.randn(tokens, experts, device=device),), (experts // 4,)


KERNELS: dict[str, tuple[Any, Callable[..., Tensor], Callable[..., Inputs]]] = {
    "masked activation": (masked, masked.masked_activation, activation_inputs),
    "soft top-k": (router, router.soft_top_k, soft_inputs),
}
"""For each kernel: the module that launches it, the function that uses it, and its inputs."""


def compared(
    name: str,
    sizes: tuple[int, int, int],
    device: torch.device,
    rounds: int,
    kernels: Any,
    backend: str,
    calls: int = 8,
) -> dict[str, Any]:
    """Milliseconds per call, forward and with backward, by `triton`, `eager` and `compiled`.

    Args:
        name: A key of `KERNELS`.
        sizes: Tokens, neurons and experts.
        device: Device to run on.
        rounds: Number of turns.
        kernels: `dotmoe.moe.triton_kernels`.
        backend: Backend of `torch.compile`.
        calls: Calls per measurement, after which the clock waits for the device.
    """
    module, function, inputs = KERNELS[name]
    leaves, others = inputs(*sizes, device)
    grad = torch.randn_like(leaves[0])
    compiled = torch.compile(function, backend=backend)
    clock = Clock(device)

    def triton(_: Tensor) -> Any:
        return kernels

    def none(_: Tensor) -> None:
        return None

    def taken(
        kernels_for: Callable[[Tensor], Any], call: Callable[..., Tensor]
    ) -> dict[str, float]:
        with patch.object(module, "kernels_for", kernels_for):
            with torch.no_grad(), clock.part("forward"):
                for _ in range(calls):
                    call(*leaves, *others)
            wanted = [leaf.detach().requires_grad_() for leaf in leaves]
            with clock.part("both"):
                for _ in range(calls):
                    torch.autograd.grad(call(*wanted, *others), wanted, grad)
        return {part: 1e3 * seconds / calls for part, seconds in clock.seconds().items()}

    forms = {"triton": (triton, function), "eager": (none, function), "compiled": (none, compiled)}
    found = in_turns({form: partial(taken, *how) for form, how in forms.items()}, rounds)
    milliseconds = {form: medians(each) for form, each in found.items()}
    for each in milliseconds.values():
        each["backward"] = max(0.0, each["both"] - each["forward"])
    return {"sizes": sizes, "milliseconds": milliseconds}
