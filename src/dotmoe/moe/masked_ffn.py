"""The training-time form of an MoE layer: the dense FFN under the mask R M^T (eq:moe_output)."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dotmoe.models.traits import GatedFFN
from dotmoe.moe.losses import balance_loss, z_loss
from dotmoe.moe.router import Surrogate, router_logits, straight_through_mask, top_k_mask


@dataclass(kw_only=True)
class Masking:
    """What every masked layer of one model reads: assignment, plan, routers, k; and a switch.

    With `enabled` false each layer is its dense FFN again: the teacher is the same weights with the
    masks off, and never routes or rounds.
    """

    expert_of_neuron_LN: Int[Tensor, "L N"]
    """Hard assignment, M as expert numbers; with `always_on`, E: the neuron always runs."""
    router_LED: Float[Tensor, "L E D"]
    """Router rows; a parameter during alignment."""
    active_experts: int
    plan_LNE: Float[Tensor, "L N E"] | None = None
    """Soft plan that receives the assignment's gradient (eq:assignment_ste); None: none does."""
    surrogate: Surrogate | None = None
    """Soft stand-in for the router's gradient; None: the mask is not differentiated."""
    surrogate_temperature: float = 1.0
    always_on: bool = False
    """Some neurons belong to no expert. Only without a surrogate."""
    first_layer: int = 0
    """Layers before this one stay dense."""
    enabled: bool = True
    z_losses: list[Tensor] = field(default_factory=list)
    """One per masked layer of the running forward pass, in order of execution."""
    balance_losses: list[Tensor] = field(default_factory=list)

    def clear_losses(self) -> None:
        """Forget the auxiliary losses of the last forward pass."""
        self.z_losses.clear()
        self.balance_losses.clear()


class MaskedFFN(nn.Module):
    """Takes the place of a dense FFN; same weights, same call, masked when `masking.enabled`."""

    def __init__(
        self, dense: nn.Module, projections: GatedFFN, masking: Masking, layer: int
    ) -> None:
        super().__init__()
        self.dense = dense
        self.masking = masking
        self.layer = layer
        self._projections = (projections,)  # in a tuple: not registered a second time

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]: (H * (R M^T)) W_down, only k experts' neurons contribute."""
        if not self.masking.enabled:
            dense_output: Tensor = self.dense(x)
            return dense_output
        (projections,) = self._projections
        hidden = F.silu(projections.gate(x)) * projections.up(x)
        routing_TE = self._route(x.reshape(-1, x.shape[-1]))
        masking = self.masking
        plan = None if masking.plan_LNE is None else masking.plan_LNE[self.layer]
        masked = mask_neurons(
            hidden.reshape(-1, hidden.shape[-1]),
            routing_TE,
            masking.expert_of_neuron_LN[self.layer],
            plan,
        )
        output: Tensor = projections.down(masked.view(hidden.shape))
        return output

    def _route(self, x_TD: Tensor) -> Tensor:
        masking = self.masking
        logits = router_logits(x_TD, masking.router_LED[self.layer])
        if masking.surrogate is None:
            hard = top_k_mask(logits, masking.active_experts)
            return F.pad(hard, (0, 1), value=1.0) if masking.always_on else hard
        mask = straight_through_mask(
            logits,
            masking.active_experts,
            surrogate=masking.surrogate,
            temperature=masking.surrogate_temperature,
        )
        masking.z_losses.append(z_loss(logits))
        masking.balance_losses.append(balance_loss(logits, mask))
        return mask


def mask_neurons(
    hidden_TN: Float[Tensor, "T N"],
    routing_TE: Float[Tensor, "T E"],
    expert_of_neuron_N: Int[Tensor, " N"],
    plan_NE: Float[Tensor, "N E"] | None = None,
) -> Float[Tensor, "T N"]:
    """H * (R M^T) with straight-through gradients for R and M (eq:moe_output, eq:assignment_ste).

    With a hard M, R M^T is a gather: column n of the mask is column `expert_of_neuron[n]` of R. No
    T x N x E product is formed.

    Args:
        hidden_TN: FFN activations H.
        routing_TE: Routing mask R, entries 0 or 1; cast to H's dtype.
        expert_of_neuron_N: Hard assignment M.
        plan_NE: Soft plan; its values are not read, it only receives M's gradient.

    Returns:
        Masked activations in H's dtype, bit-equal to `H * R[:, expert_of_neuron]`.

    Gradient:
        With G = dL/d(mask) = dL/d(out) * H: to H, dL/d(out) * mask; to R, the sum of G over each
        expert's neurons; to the plan, G^T R. All sums are accumulated in float32.
    """
    result: Tensor = _MaskNeurons.apply(  # type: ignore[no-untyped-call]
        hidden_TN, routing_TE, expert_of_neuron_N, plan_NE
    )
    return result


class _MaskNeurons(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TN: Tensor,
        routing_TE: Tensor,
        expert_of_neuron_N: Tensor,
        plan_NE: Tensor | None,
    ) -> Tensor:
        routing = routing_TE.to(hidden_TN.dtype)
        ctx.save_for_backward(hidden_TN, routing, expert_of_neuron_N)
        ctx.plan_dtype = None if plan_NE is None else plan_NE.dtype
        ctx.routing_dtype = routing_TE.dtype
        return hidden_TN * routing.index_select(1, expert_of_neuron_N)

    @staticmethod
    def backward(
        ctx: Any, grad_TN: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, Tensor | None]:
        hidden, routing, expert_of_neuron = ctx.saved_tensors
        wants_hidden, wants_routing, _, wants_plan = ctx.needs_input_grad
        grad_hidden = grad_routing = grad_plan = None
        if wants_hidden:
            grad_hidden = grad_TN * routing.index_select(1, expert_of_neuron)
        if wants_routing or wants_plan:
            grad_mask = grad_TN * hidden
        if wants_routing:
            order = torch.argsort(expert_of_neuron, stable=True)
            grouped = grad_mask.index_select(1, order).view(len(hidden), routing.shape[1], -1)
            dtype = torch.promote_types(grouped.dtype, torch.float32)
            grad_routing = grouped.sum(dim=2, dtype=dtype).to(ctx.routing_dtype)
        if wants_plan:
            grad_plan = (grad_mask.T @ routing).to(ctx.plan_dtype)
        return grad_hidden, grad_routing, None, grad_plan
