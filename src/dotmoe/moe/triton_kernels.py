"""Triton kernels of the masked FFN and of the soft top-k. Imported only where Triton is there.

Arithmetic is float32. Pointers are to contiguous tensors; a program works on one token.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def masked_activation(
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
def masked_activation_gradient(  # noqa: PLR0913
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
    WANTS_MASK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Gradients of gate, up and, if `WANTS_MASK`, of the mask's entries."""
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
    if WANTS_MASK:
        tl.store(grad_mask + at, (g * silu * y).to(grad_mask.dtype.element_ty), mask=inside)


@triton.jit
def soft_top_k(
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
