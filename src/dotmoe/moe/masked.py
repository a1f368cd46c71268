"""The training-time form of an MoE layer: the dense FFN under the mask R M^T (eq:moe_output)."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dotmoe.layout import ExpertLayout
from dotmoe.models.dense import DenseModel
from dotmoe.models.traits import GatedFFN
from dotmoe.moe.losses import product_in_float32
from dotmoe.moe.router import Routing, router_logits, triton_kernels, triton_runs_on
from dotmoe.moe.units import replaced


@dataclass(kw_only=True)
class Masking(Routing):
    """What every masked layer of one model reads: routing, assignment, plan, routers.

    With `enabled` false each layer is its dense FFN again: the teacher is the same weights with the
    masks off. Tensors cover the split layers alone: `first_layer` and those after it.
    """

    expert_of_neuron_LN: Int[Tensor, "L N"]
    """Hard assignment, M as expert numbers; with `always_on`, E: the neuron always runs."""
    router_LED: Float[Tensor, "L E D"] | tuple[Float[Tensor, "E D"], ...]
    """Router rows, or those of each layer apart."""
    plan_LNE: Float[Tensor, "L N E"] | tuple[Float[Tensor, "N E"], ...] | None = None
    """Soft plan, or that of each layer apart; receives the assignment's gradient
    (eq:assignment_ste). None: nothing does."""
    always_on: bool = False
    """Some neurons belong to no expert. Only without a surrogate."""
    first_layer: int = 0
    """Layers before this one stay dense."""


class MaskedFFN(nn.Module):
    """Takes the place of a dense FFN; same weights, same call, masked when `masking.enabled`."""

    def __init__(
        self, dense: nn.Module, projections: GatedFFN, masking: Masking, layer: int
    ) -> None:
        super().__init__()
        self.dense = dense
        self.masking = masking
        self.index = layer - masking.first_layer
        self._projections = (projections,)  # in a tuple: not registered a second time

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]: (H * (R M^T)) W_down, only k experts' neurons contribute."""
        masking = self.masking
        if not masking.enabled:
            dense_output: Tensor = self.dense(x)
            return dense_output
        (projections,) = self._projections
        x_TD = x.reshape(-1, x.shape[-1])
        mask_TE, _ = masking.route(router_logits(x_TD, masking.router_LED[self.index]))
        masked_TN = masked_activation(
            projections.gate(x_TD),
            projections.up(x_TD),
            F.pad(mask_TE, (0, 1), value=1.0) if masking.always_on else mask_TE,
            masking.expert_of_neuron_LN[self.index],
            None if masking.plan_LNE is None else masking.plan_LNE[self.index],
        )
        output: Tensor = projections.down(masked_TN).view(x.shape)
        return output


def masked(dense: DenseModel, masking: Masking) -> AbstractContextManager[None]:
    """Inside, every split FFN of `dense.model` obeys `masking`; afterwards all is as before."""
    layers = dense.family.layers(dense.model)
    return replaced(
        dense,
        range(masking.first_layer, len(layers)),
        lambda index, ffn: MaskedFFN(ffn, dense.family.ffn(layers[index]), masking, index),
    )


def masked_by(dense: DenseModel, layout: ExpertLayout) -> AbstractContextManager[None]:
    """Inside, `dense.model` computes exactly the MoE that the layout describes (eq:moe_output).

    Hard top-k routing from float32 logits, chosen experts summed with weight 1. This is the
    reference that every export is compared with.
    """
    device, split = dense.device, slice(layout.first_dense_layers, None)
    experts = layout.expert_of_neuron_LN[split].to(device)
    masking = Masking(
        active_experts=layout.active_experts,
        expert_of_neuron_LN=experts % (layout.num_experts + 1),
        router_LED=layout.router_LED[split].to(device, torch.float32),
        always_on=layout.shared_size > 0,
        first_layer=layout.first_dense_layers,
    )
    return masked(dense, masking)


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
        run = triton_kernels().masked_activation if triton_runs_on(gate_TN) else _forward
        return run(gate_TN, up_TN, routing, expert_of_neuron_N)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, routing, expert_of_neuron = ctx.saved_tensors
        _, _, wants_routing, _, wants_plan = ctx.needs_input_grad
        run = triton_kernels().masked_activation_gradient if triton_runs_on(gate) else _backward
        grad_gate, grad_up, grad_mask = run(grad_TN, gate, up, routing, expert_of_neuron)
        grad_routing = grad_plan = None
        if wants_routing:
            sums = _expert_sums(grad_mask, expert_of_neuron, routing.shape[1])
            grad_routing = sums.to(ctx.routing_dtype)
        if wants_plan:
            grad_plan = product_in_float32(grad_mask.T, routing).to(ctx.plan_dtype)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate, up and the mask entries, G."""
    silu = F.silu(gate_TN)
    grad_mask = (silu * up_TN).mul_(grad_TN)
    grad_hidden = routing_TE.index_select(1, expert_of_neuron_N).mul_(grad_TN)
    grad_up = silu.mul_(grad_hidden)
    grad_silu = grad_hidden.mul_(up_TN)
    return torch.ops.aten.silu_backward(grad_silu, gate_TN), grad_up, grad_mask


def _expert_sums(values_TN: Tensor, expert_of_neuron_N: Tensor, num_experts: int) -> Tensor:
    """Sum over the neurons of each expert, [T, E], in float32 at least."""
    if values_TN.is_cuda:
        members = F.one_hot(expert_of_neuron_N, num_experts).to(values_TN.dtype)
        return product_in_float32(values_TN, members)
    dtype = torch.promote_types(values_TN.dtype, torch.float32)
    sums_TE = torch.zeros(len(values_TN), num_experts, dtype=dtype)
    return sums_TE.index_add_(1, expert_of_neuron_N, values_TN.to(dtype))
