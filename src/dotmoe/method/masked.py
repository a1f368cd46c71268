"""The training-time form of an MoE layer: dense units under the mask R M^T (eq:moe_output)."""

from collections.abc import Callable, Container, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dotmoe.common.precision import product_in_float32
from dotmoe.method.layout import ExpertLayout, columns_of
from dotmoe.method.router import Routing, is_dense
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.family import GatedFFN
from dotmoe.models.hooks import computing, input_hooks
from dotmoe.models.targets import TARGETS
from dotmoe.models.traits import SILU, Activation


@dataclass(kw_only=True)
class Masking:
    """The state that all masked layers of one target read; tensors cover only the split layers."""

    routing: Routing

    expert_of_neuron_LN: Int[Tensor, "L N"]
    """Hard assignment M as columns of R: experts 0 to E - 1, then the columns of `fixed`."""
    router_LED: Float[Tensor, "L E D"] | tuple[Float[Tensor, "E D"], ...]
    """Router rows of all layers, as one tensor or as one tensor per layer."""
    plan_LNE: Float[Tensor, "L N E"] | tuple[Float[Tensor, "N E"], ...] | None = None
    """Soft plan in the same form, or None; takes the assignment's gradient (eq:assignment_ste)."""
    fixed: tuple[float, ...] = ()
    """Values of the columns E, E + 1, ... of R, the same for all tokens: 1 for neurons that always
    run and belong to no routed expert, 0 for neurons that never run."""
    first_layer: int = 0
    """Layers before this one stay dense."""
    target: str = "ffn"

    def of_layer(self, index: int, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """R (with the columns of `fixed`), assignment and plan of split layer number `index`."""
        mask_TE, _ = self.routing.route(self.routing.logits(x_TD, self.router_LED[index]))
        for value in self.fixed:
            mask_TE = F.pad(mask_TE, (0, 1), value=value)
        plan_NE = None if self.plan_LNE is None else self.plan_LNE[index]
        return mask_TE, self.expert_of_neuron_LN[index], plan_NE


def masked_ffn(
    dense: Callable[..., Tensor], projections: GatedFFN, masking: Masking, index: int, x: Tensor
) -> Tensor:
    """Map [..., D] to [..., D]: (H * (R M^T)) W_down, so only k experts' neurons contribute.

    Within `dense_only`, `dense` computes the output. `index` counts the split layers.
    """
    if is_dense():
        return dense(x)
    x_TD = x.reshape(-1, x.shape[-1])
    gate_TN, up_TN = projections.gate(x_TD), projections.up(x_TD)
    masked_TN = masked_activation(
        gate_TN, up_TN, *masking.of_layer(index, x_TD), projections.activation
    )
    output: Tensor = projections.down(masked_TN).view(x.shape)
    return output


def masked_attention(
    dense: Callable[..., Any],
    projection: nn.Module,
    masking: Masking,
    index: int,
    hidden_states: Tensor,
    **kwargs: Any,
) -> Any:
    """Attention in which all heads compute, but W_O reads only the heads of k experts.

    This is eq:moe_output with the concatenated outputs of the heads as H (sec:attention_moe).
    """
    if is_dense():
        return dense(hidden_states=hidden_states, **kwargs)
    units_TN = unit_mask(*masking.of_layer(index, hidden_states.flatten(0, -2)))

    def mask(_: int, heads: Tensor) -> Tensor:
        parts = heads.view(*units_TN.shape, -1)
        return (parts * units_TN.unsqueeze(-1).to(heads.dtype)).view(heads.shape)

    with input_hooks({0: projection}, mask):
        return dense(hidden_states=hidden_states, **kwargs)


def unit_mask(mask_TE: Tensor, expert_of_unit_N: Tensor, plan_NE: Tensor | None) -> Tensor:
    """R M^T, [T, N], with straight-through gradients (eq:assignment_ste); for few units."""
    member_NE = F.one_hot(expert_of_unit_N, mask_TE.shape[1]).to(mask_TE.dtype)
    if plan_NE is not None:
        member_NE = member_NE + (plan_NE - plan_NE.detach())
    return mask_TE @ member_NE.T


def masked(
    dense: DenseModel, maskings: Iterable[Masking], only: Container[int] | None = None
) -> AbstractContextManager[None]:
    """Within this context, `maskings` apply to the split layers of the model, or `only` to some."""
    family = dense.family
    forwards = dict[nn.Module, Callable[..., Any]]()
    for masking in maskings:
        target = TARGETS[masking.target]
        first = masking.first_layer
        for index, layer in enumerate(family.layers(dense.model)):
            if index < first or (only is not None and index not in only):
                continue
            block = family.block(layer, target)
            how = (masking, index - first)
            if target.name == "attention":
                output = family.output(layer, target)
                forward = partial(masked_attention, block.forward, output, *how)
            else:
                forward = partial(masked_ffn, block.forward, family.ffn(layer), *how)
            forwards[block] = forward
    return computing(forwards)


def masked_by(dense: DenseModel, *layouts: ExpertLayout) -> AbstractContextManager[None]:
    """Within this context, `dense` computes exactly the layouts' MoE, the reference of exports."""
    return masked(dense, maskings_of(dense, *layouts))


def maskings_of(dense: DenseModel, *layouts: ExpertLayout) -> list[Masking]:
    """One `Masking` for each layout, on the device of the model."""
    return [_masking_of(dense, layout) for layout in layouts]


def _masking_of(dense: DenseModel, layout: ExpertLayout) -> Masking:
    first = layout.moe_layers.start
    expert_LN = layout.expert_of_neuron_LN[first:].to(dense.device)
    return Masking(
        routing=Routing(active_experts=layout.active_experts),
        expert_of_neuron_LN=columns_of(expert_LN, layout.num_experts),
        router_LED=layout.router_LED[first:].to(dense.device, torch.float32),
        fixed=(1.0, 0.0),  # for neurons always on and dropped, as `columns_of` numbers them
        first_layer=first,
        target=layout.target,
    )


def masked_activation(
    gate_TN: Float[Tensor, "T N"],
    up_TN: Float[Tensor, "T N"],
    routing_TE: Float[Tensor, "T E"],
    expert_of_neuron_N: Int[Tensor, " N"],
    plan_NE: Float[Tensor, "N F"] | None = None,
    activation: Activation = SILU,
) -> Float[Tensor, "T N"]:
    """H * (R M^T), H = activation(gate) * up, with straight-through gradients for R and M.

    These are eq:moe_output and eq:assignment_ste. With a hard M, R M^T is a gather,
    `R[:, expert_of_neuron]`. The plan's values are not read: it only receives M's gradient.

    Gradient:
        With G = dL/d(mask) = dL/d(out) * H, R receives the sum of G over each expert's neurons, and
        the plan receives G^T R, both accumulated in float32. H is recomputed from gate and up.
    """
    result: Tensor = _MaskedActivation.apply(  # type: ignore[no-untyped-call]
        gate_TN, up_TN, routing_TE, expert_of_neuron_N, plan_NE, activation
    )
    return result


class _MaskedActivation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        routing_TE: Tensor,
        expert_of: Tensor,
        plan: Any,
        activation: Activation,
    ) -> Tensor:
        routing = routing_TE.to(gate.dtype)
        ctx.save_for_backward(gate, up, routing, expert_of)
        ctx.dtypes = (routing_TE.dtype, getattr(plan, "dtype", None))
        ctx.activation = activation
        return activation.apply(gate).mul_(up).mul_(routing.index_select(1, expert_of))

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, routing, expert_of = ctx.saved_tensors
        activated = ctx.activation.apply(gate)
        grad_mask = (activated * up).mul_(grad_TN)
        grad_hidden = routing.index_select(1, expert_of).mul_(grad_TN)
        grad_up = activated.mul_(grad_hidden)
        grad_gate = ctx.activation.backward(grad_hidden.mul_(up), gate)
        grad_routing = grad_plan = None
        routing_dtype, plan_dtype = ctx.dtypes
        if ctx.needs_input_grad[2]:
            grad_routing = sums_by_expert(grad_mask, expert_of, routing.shape[1]).to(routing_dtype)
        if ctx.needs_input_grad[4]:
            grad_plan = product_in_float32(grad_mask.T, routing).to(plan_dtype)
        return grad_gate, grad_up, grad_routing, None, grad_plan, None


def sums_by_expert(values_TN: Tensor, expert_of_neuron_N: Tensor, num_experts: int) -> Tensor:
    """Sum over the neurons of each expert, [T, E], accumulated in at least float32.

    On a GPU it is a product, because `index_add_` there adds in another order every time.
    """
    dtype = torch.promote_types(values_TN.dtype, torch.float32)
    if num_experts == 1:
        return values_TN.sum(dim=1, keepdim=True, dtype=dtype)
    if values_TN.device.type != "cpu":
        members = F.one_hot(expert_of_neuron_N, num_experts).to(values_TN.dtype)
        return product_in_float32(values_TN, members)
    sums_TE = values_TN.new_zeros(len(values_TN), num_experts, dtype=dtype)
    return sums_TE.index_add_(1, expert_of_neuron_N, values_TN.to(dtype))
