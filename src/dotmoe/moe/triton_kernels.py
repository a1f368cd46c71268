"""Triton kernels of the masked FFN and of the soft top-k, and how they are launched.

Imported only where Triton is installed; where `router.triton_runs_on` says no, PyTorch's operations
do the same work. Arithmetic is float32. A program works on one token.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

_COLUMNS = 1_024
"""Neurons of one program."""


@triton.jit
def _masked_activation(
    gate, up, routing, expert_of_neuron, masked, num_neurons, num_experts, COLUMNS: tl.constexpr
):
    """SiLU(gate) * up * R[:, expert_of_neuron] for `COLUMNS` neurons of a token."""
    token = tl.program_id(0).to(tl.int64)
    neuron = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = neuron < num_neurons
    at = token * num_neurons + neuron
    expert = tl.load(expert_of_neuron + neuron, mask=inside, other=0)
    mask = tl.load(routing + token * num_experts + expert, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    # The teacher's FFN rounds here too; where all experts run, student and teacher agree.
    silu = (x * tl.sigmoid(x)).to(masked.dtype.element_ty).to(tl.float32)
    hidden = silu * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(masked + at, (hidden * mask).to(masked.dtype.element_ty), mask=inside)


@triton.jit
def _masked_activation_gradient(  # noqa: PLR0913
    grad,
    gate,
    up,
    routing,
    expert_of_neuron,
    grad_gate,
    grad_up,
    grad_mask,
    num_neurons,
    num_experts,
    COLUMNS: tl.constexpr,
):
    """Gradients of gate, up and the mask's entries."""
    token = tl.program_id(0).to(tl.int64)
    neuron = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = neuron < num_neurons
    at = token * num_neurons + neuron
    expert = tl.load(expert_of_neuron + neuron, mask=inside, other=0)
    mask = tl.load(routing + token * num_experts + expert, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(x)
    silu = x * sigmoid
    slope = sigmoid * (1.0 + x * (1.0 - sigmoid))
    tl.store(grad_gate + at, (g * mask * y * slope).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + at, (g * mask * silu).to(grad_up.dtype.element_ty), mask=inside)
    tl.store(grad_mask + at, (g * silu * y).to(grad_mask.dtype.element_ty), mask=inside)


@triton.jit
def _soft_top_k(
    scaled,
    lower,
    upper,
    soft,
    num_experts,
    active_experts,
    tiny,
    ITERATIONS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """The row of a token; the same steps as `dotmoe.moe.router` takes with PyTorch."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    inside = expert < num_experts
    at = token * num_experts + expert
    x = tl.load(scaled + at, mask=inside, other=0.0)
    low, high = tl.load(lower + token), tl.load(upper + token)
    theta = (low + high) / 2
    for _ in range(ITERATIONS):
        value = tl.where(inside, tl.sigmoid(x - theta), 0.0)
        excess = tl.sum(value, axis=0) - active_experts
        low = tl.where(excess > 0, theta, low)
        high = tl.where(excess > 0, high, theta)
        slope = tl.maximum(tl.sum(value * (1.0 - value), axis=0), tiny)
        newton = theta + excess / slope
        theta = tl.where((newton >= low) & (newton <= high), newton, (low + high) / 2)
    tl.store(soft + at, tl.sigmoid(x - theta), mask=inside)


def masked_activation(
    gate_TN: Float[Tensor, "T N"],
    up_TN: Float[Tensor, "T N"],
    routing_TE: Float[Tensor, "T E"],
    expert_of_neuron_N: Int[Tensor, " N"],
) -> Float[Tensor, "T N"]:
    """SiLU(gate) * up * R[:, expert_of_neuron]; rounded where PyTorch's operations would round."""
    tensors = _contiguous(gate_TN, up_TN, routing_TE, expert_of_neuron_N)
    masked_TN = torch.empty_like(tensors[0])
    with torch.cuda.device(gate_TN.get_device()):
        _masked_activation[_grid(gate_TN)](
            *tensors, masked_TN, gate_TN.shape[1], routing_TE.shape[1], COLUMNS=_COLUMNS
        )
    return masked_TN


def masked_activation_gradient(
    grad_TN: Float[Tensor, "T N"],
    gate_TN: Float[Tensor, "T N"],
    up_TN: Float[Tensor, "T N"],
    routing_TE: Float[Tensor, "T E"],
    expert_of_neuron_N: Int[Tensor, " N"],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate, up and the entries of the mask; rounded once."""
    tensors = _contiguous(grad_TN, gate_TN, up_TN, routing_TE, expert_of_neuron_N)
    grad_gate_TN, grad_up_TN, grad_mask_TN = (torch.empty_like(tensors[1]) for _ in range(3))
    with torch.cuda.device(gate_TN.get_device()):
        _masked_activation_gradient[_grid(gate_TN)](
            *tensors,
            grad_gate_TN,
            grad_up_TN,
            grad_mask_TN,
            gate_TN.shape[1],
            routing_TE.shape[1],
            COLUMNS=_COLUMNS,
        )
    return grad_gate_TN, grad_up_TN, grad_mask_TN


def soft_top_k(
    scaled_TE: Float[Tensor, "T E"],
    low_T1: Float[Tensor, "T 1"],
    high_T1: Float[Tensor, "T 1"],
    active_experts: int,
    *,
    iterations: int,
) -> Float[Tensor, "T E"]:
    """sigmoid(x - theta_t) with rows that sum to k; theta_t by Newton steps inside its bracket."""
    tensors = _contiguous(scaled_TE, low_T1, high_T1)
    soft_TE = torch.empty_like(tensors[0])
    num_tokens, num_experts = scaled_TE.shape
    with torch.cuda.device(scaled_TE.get_device()):
        _soft_top_k[(num_tokens,)](
            *tensors,
            soft_TE,
            num_experts,
            float(active_experts),
            torch.finfo(scaled_TE.dtype).tiny,
            ITERATIONS=iterations,
            EXPERTS=1 << (num_experts - 1).bit_length(),
        )
    return soft_TE


def _grid(values_TN: Tensor) -> tuple[int, int]:
    return len(values_TN), -(-values_TN.shape[1] // _COLUMNS)


def _contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.contiguous() for tensor in tensors)
