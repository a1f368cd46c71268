"""SiLU(gate) * up under the mask R M^T, as one operation that keeps nothing but gate and up."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.moe import kernels


def masked_activation(
    gate_TN: Float[Tensor, "T N"],
    up_TN: Float[Tensor, "T N"],
    routing_TE: Float[Tensor, "T E"],
    expert_of_neuron_N: Int[Tensor, " N"],
    plan_NE: Float[Tensor, "N F"] | None = None,
) -> Float[Tensor, "T N"]:
    """H * (R M^T), H = SiLU(gate) * up, with straight-through gradients for R and M.

    These are eq:moe_output and eq:assignment_ste. With a hard M, R M^T is a gather: column n of the
    mask is column `expert_of_neuron[n]` of R. No T x N x E product is formed. On CUDA one Triton
    kernel does all of it; elsewhere, and without Triton, PyTorch's own operations do.

    Args:
        gate_TN: Pre-activations of the gate projection.
        up_TN: Outputs of the up projection, same dtype.
        routing_TE: Routing mask R, entries 0 or 1; cast to the dtype of `gate_TN`.
        expert_of_neuron_N: Hard assignment M.
        plan_NE: Soft plan; its values are not read, it only receives M's gradient.

    Returns:
        Masked activations. Without the kernel, bit-equal to
        `F.silu(gate) * up * R[:, expert_of_neuron]`.

    Gradient:
        With G = dL/d(mask) = dL/d(out) * H: to R, the sum of G over each expert's neurons; to the
        plan, G^T R; to gate and up as the product rule says. H is computed again from gate and up.
        Sums over neurons and tokens are accumulated in float32.
    """
    result: Tensor = _MaskedActivation.apply(  # type: ignore[no-untyped-call]
        gate_TN, up_TN, routing_TE, expert_of_neuron_N, plan_NE
    )
    return result


class _MaskedActivation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_TN: Tensor,
        up_TN: Tensor,
        routing_TE: Tensor,
        expert_of_neuron_N: Tensor,
        plan_NE: Tensor | None,
    ) -> Tensor:
        routing = routing_TE.to(gate_TN.dtype)
        ctx.save_for_backward(gate_TN, up_TN, routing, expert_of_neuron_N)
        ctx.plan_dtype = None if plan_NE is None else plan_NE.dtype
        ctx.routing_dtype = routing_TE.dtype
        run = kernels.masked_activation if kernels.run_on(gate_TN) else _forward
        return run(gate_TN, up_TN, routing, expert_of_neuron_N)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, routing, expert_of_neuron = ctx.saved_tensors
        _, _, wants_routing, _, wants_plan = ctx.needs_input_grad
        run = kernels.masked_activation_gradient if kernels.run_on(gate) else _backward
        grad_gate, grad_up, grad_mask = run(
            grad_TN, gate, up, routing, expert_of_neuron, wants_mask=wants_routing or wants_plan
        )
        grad_routing = grad_plan = None
        if wants_routing and grad_mask is not None:
            sums = _expert_sums(grad_mask, expert_of_neuron, routing.shape[1])
            grad_routing = sums.to(ctx.routing_dtype)
        if wants_plan and grad_mask is not None:
            grad_plan = _product(grad_mask.T, routing).to(ctx.plan_dtype)
        return grad_gate, grad_up, grad_routing, None, grad_plan


def _forward(
    gate_TN: Tensor, up_TN: Tensor, routing_TE: Tensor, expert_of_neuron_N: Tensor
) -> Tensor:
    masked = F.silu(gate_TN).mul_(up_TN)
    return masked.mul_(routing_TE.index_select(1, expert_of_neuron_N))


def _backward(
    grad_TN: Tensor,
    gate_TN: Tensor,
    up_TN: Tensor,
    routing_TE: Tensor,
    expert_of_neuron_N: Tensor,
    *,
    wants_mask: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of gate, up and, if wanted, of the mask entries, G."""
    silu = F.silu(gate_TN)
    grad_mask = (silu * up_TN).mul_(grad_TN) if wants_mask else None
    grad_hidden = routing_TE.index_select(1, expert_of_neuron_N).mul_(grad_TN)
    grad_up = silu.mul_(grad_hidden)
    grad_silu = grad_hidden.mul_(up_TN)
    return torch.ops.aten.silu_backward(grad_silu, gate_TN), grad_up, grad_mask


def _expert_sums(values_TN: Tensor, expert_of_neuron_N: Tensor, num_experts: int) -> Tensor:
    """Sum over the neurons of each expert, [T, E], in float32 at least."""
    if values_TN.is_cuda:
        members = F.one_hot(expert_of_neuron_N, num_experts).to(values_TN.dtype)
        return _product(values_TN, members)
    dtype = torch.promote_types(values_TN.dtype, torch.float32)
    sums_TE = torch.zeros(len(values_TN), num_experts, dtype=dtype)
    return sums_TE.index_add_(1, expert_of_neuron_N, values_TN.to(dtype))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product; on CUDA, of 16-bit factors, the result is not rounded to 16 bits again."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right
