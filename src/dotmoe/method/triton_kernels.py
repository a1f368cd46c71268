"""Triton kernels of the masked FFN and the soft top-k; `router.kernels_for` decides on their use.

Arithmetic is float32. Each program handles one token.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dotmoe.models.family import GELU, Activation

_COLUMNS = 1_024
"""Neurons that one program handles."""


@triton.jit
def masked_activation(
    gate,
    up,
    routing,
    expert_of,
    masked,
    num_neurons,
    num_experts,
    IS_GELU: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """activation(gate) * up * R[:, expert_of_neuron] for `COLUMNS` neurons of a token.

    Values are rounded where PyTorch's operations would round them.
    """
    token = tl.program_id(0).to(tl.int64)
    neuron = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = neuron < num_neurons
    at = token * num_neurons + neuron
    expert = tl.load(expert_of + neuron, mask=inside, other=0)
    mask = tl.load(routing + token * num_experts + expert, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    # The teacher's FFN rounds here too, so student and teacher agree if all experts run.
    # (1 + tanh(u)) / 2 is sigmoid(2 u), which makes tanh GELU a SiLU with another slope.
    within = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x) if IS_GELU else x
    activated = (x * tl.sigmoid(within)).to(masked.dtype.element_ty).to(tl.float32)
    hidden = activated * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(masked + at, (hidden * mask).to(masked.dtype.element_ty), mask=inside)


@triton.jit
def masked_activation_gradient(
    grad,
    gate,
    up,
    routing,
    expert_of,
    grads,
    num_neurons,
    num_experts,
    IS_GELU: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write to `grads`, in this order, the gradients of gate, up and mask entries; rounded once."""
    token = tl.program_id(0).to(tl.int64)
    neuron = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = neuron < num_neurons
    at = token * num_neurons + neuron
    expert = tl.load(expert_of + neuron, mask=inside, other=0)
    mask = tl.load(routing + token * num_experts + expert, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    if IS_GELU:
        sigmoid = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
        within = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        slope = sigmoid + x * (sigmoid * (1.0 - sigmoid) * within)
    else:
        sigmoid = tl.sigmoid(x)
        slope = sigmoid * (1.0 + x * (1.0 - sigmoid))
    activated = x * sigmoid
    size, kind = tl.num_programs(0).to(tl.int64) * num_neurons, grads.dtype.element_ty
    tl.store(grads + at, (g * mask * y * slope).to(kind), mask=inside)
    tl.store(grads + size + at, (g * mask * activated).to(kind), mask=inside)
    tl.store(grads + 2 * size + at, (g * activated * y).to(kind), mask=inside)


@triton.jit
def _soft_top_k(
    scaled, lower, upper, soft, num_experts, k, tiny, STEPS: tl.constexpr, EXPERTS: tl.constexpr
):
    """Compute a token's row, by the same steps as `dotmoe.method.router` takes with PyTorch."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    inside = expert < num_experts
    at = token * num_experts + expert
    x = tl.load(scaled + at, mask=inside, other=0.0)
    low, high = tl.load(lower + token), tl.load(upper + token)
    theta = (low + high) / 2
    for _ in range(STEPS):
        value = tl.where(inside, tl.sigmoid(x - theta), 0.0)
        excess = tl.sum(value, axis=0) - k
        low = tl.where(excess > 0, theta, low)
        high = tl.where(excess > 0, high, theta)
        slope = tl.maximum(tl.sum(value * (1.0 - value), axis=0), tiny)
        newton = theta + excess / slope
        theta = tl.where((newton >= low) & (newton <= high), newton, (low + high) / 2)
    tl.store(soft + at, tl.sigmoid(x - theta), mask=inside)


def over_neurons(
    kernel: Any, num_results: int, activation: Activation, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Run `masked_activation` or its gradient kernel; each of the results is [T, N]."""
    (num_tokens, num_neurons), num_experts = tensors[0].shape, tensors[-2].shape[1]
    with torch.cuda.device(tensors[0].get_device()):
        results = tensors[0].new_empty(num_results, num_tokens, num_neurons)
        kernel[num_tokens, triton.cdiv(num_neurons, _COLUMNS)](
            *(tensor.contiguous() for tensor in tensors),
            results,
            num_neurons,
            num_experts,
            IS_GELU=activation is GELU,
            COLUMNS=_COLUMNS,
        )
    return results.unbind()


def soft_top_k(
    scaled_TE: Tensor, low_T1: Tensor, high_T1: Tensor, active_experts: int, iterations: int
) -> Tensor:
    """sigmoid(x - theta_t) with rows that sum to k; Newton steps find theta_t in its bracket."""
    num_tokens, num_experts = scaled_TE.shape
    soft_TE = torch.empty_like(scaled_TE, memory_format=torch.contiguous_format)
    with torch.cuda.device(scaled_TE.get_device()):
        _soft_top_k[(num_tokens,)](
            *(tensor.contiguous() for tensor in (scaled_TE, low_T1, high_T1)),
            soft_TE,
            num_experts,
            float(active_experts),
            torch.finfo(scaled_TE.dtype).tiny,
            STEPS=iterations,
            EXPERTS=triton.next_power_of_2(num_experts),
        )
    return soft_TE
