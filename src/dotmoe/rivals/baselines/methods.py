"""The methods that split by name, what they make, and measurements under their own routers."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dotmoe.common.errors import UserError
from dotmoe.common.progress import Update, no_update
from dotmoe.method.calibrate import RidgeRouter, log_energy, routed_sums, unit_logits
from dotmoe.method.extract import Extracted
from dotmoe.method.granularity import Granularity
from dotmoe.method.layout import ALWAYS_ON, ExpertLayout, columns_of
from dotmoe.method.state import AlignState
from dotmoe.models.dense_model import DenseModel
from dotmoe.rivals.baselines.cmoe import by_representatives, cmoe
from dotmoe.rivals.baselines.contract import LayerSplit, Own, SplitInputs, gated
from dotmoe.rivals.baselines.controls import dealt, static_pruning
from dotmoe.rivals.baselines.llama_moe_v2 import llama_moe_v2
from dotmoe.rivals.baselines.lte import above_threshold, lte
from dotmoe.rivals.baselines.moefication import by_predictor, co_activation, weight_clusters


class Method(NamedTuple):
    """A published method that splits FFNs, or units of any kind."""

    split: Callable[[SplitInputs], Iterator[LayerSplit]]
    """Splits the layers of a model one after the other."""
    has_shared_expert: bool = False
    own: Own | None = None
    """The method's own router, if no stock architecture can hold it."""
    experts_of: str | None = None
    """Method that makes the same experts: only the router is this one's own."""
    of_any_units: bool = False
    """Whether the method reads no weights, so that it can split query heads as well."""
    is_static: bool = False
    """Whether the same neurons run for every token, and all others are left out."""


METHODS = {
    "random_split": Method(partial(dealt, at_random=True), of_any_units=True),
    "contiguous_split": Method(partial(dealt, at_random=False), of_any_units=True),
    "static_pruning": Method(static_pruning, has_shared_expert=True, is_static=True),
    "weight_clusters": Method(weight_clusters, own=by_predictor),
    "co_activation": Method(co_activation, own=by_predictor),
    "lte": Method(lte, own=above_threshold, experts_of="weight_clusters"),
    "llama_moe_v2": Method(llama_moe_v2),
    "llama_moe_v2_residual": Method(llama_moe_v2, has_shared_expert=True),
    "cmoe": Method(cmoe, has_shared_expert=True, own=by_representatives),
}
"""Methods to compare DOT-MoE with, by command-line name; by names of `BASELINES`."""


def granularity_of(method: str, split: Granularity) -> Granularity:
    """The split that a method uses, with as many active neurons as `split`.

    A method with a shared expert merges half of the k active experts into it, unless `split` has
    one. Raises a `UserError` if the method does not support the split.

    Example:
        >>> granularity_of("cmoe", Granularity(num_experts=16, expert_size=8, active_experts=4))
        Granularity(num_experts=14, expert_size=8, active_experts=2, shared_size=16, ...)
    """
    if method == "dot_moe":
        return split
    chosen = METHODS[method]
    active = split.active_experts
    if split.target != "ffn" and not chosen.of_any_units:
        able = [name for name in METHODS if METHODS[name].of_any_units]
        raise UserError(
            f"{method} splits only FFNs, but targets includes attention. Choose dot_moe or "
            f"{', '.join(able)}."
        )
    if split.shared_size and not chosen.has_shared_expert:
        able = [name for name in METHODS if METHODS[name].has_shared_expert]
        raise UserError(
            f"{method} does not use shared. Leave it out, or choose dot_moe, {' or '.join(able)}."
        )
    if chosen.is_static:
        dropped = (split.num_experts - active) * split.expert_size
        return replace(split, num_experts=active, dropped_size=dropped)
    if split.shared_size or not chosen.has_shared_expert:
        return split
    if active < 2:
        raise UserError(
            f"active_experts is {active}, but {method} needs one shared and one routed "
            "expert. Raise active_experts."
        )
    return split.with_shared(active // 2)


@torch.no_grad()
def baseline(method: str, inputs: SplitInputs, on_progress: Update = no_update) -> Extracted:
    """Convert by a method of `METHODS`: its experts, with its own router or a ridge regression.

    `inputs.granularity` must come from `granularity_of`.
    """
    split = inputs.granularity
    chosen = METHODS[method]
    experts, routers, owns = [], [], []
    is_fitted = inputs.config.split_router == "ridge" and not chosen.is_static
    for index, (layer, expert_N, router_ED, own) in enumerate(chosen.split(inputs)):
        if is_fitted:  # to the routed experts, as in DOT-MoE
            energy_TN = layer.energy()
            energy_TE = routed_sums(energy_TN, expert_N.to(energy_TN.device), split.num_experts)
            router_ED = RidgeRouter(layer.x_TD, inputs.calibrate.ridge)(log_energy(energy_TE))
        experts.append(expert_N.cpu())
        routers.append(unit_logits(router_ED.float(), layer.x_TD).cpu())
        owns.append({name: tensor.cpu() for name, tensor in own.items()})
        on_progress(index + 1, inputs.dense.widths.layers)
    expert_of_neuron_LN = torch.stack(experts)
    expert_of_neuron_LN[: split.first_dense_layers] = ALWAYS_ON
    own_router = {name: torch.stack([own[name] for own in owns]) for name in owns[0]}
    return Extracted(
        layout=ExpertLayout(
            expert_of_neuron_LN=expert_of_neuron_LN,
            router_LED=torch.stack(routers),
            active_experts=split.active_experts,
            target=split.target,
        ),
        own_router=own_router or None,
    )


def routed_by_own(
    method: str, dense: DenseModel, made: Extracted, shares: list[Tensor] | None = None
) -> AbstractContextManager[None]:
    """Within this context, `dense.model` is the layout's MoE, routed by the method's own router.

    For measurements only: no stock architecture holds that router. Each call of a layer appends to
    `shares` the share of the neurons that run for each token, [T]; see `active_share`.
    """
    layout = made.layout
    choose = METHODS[method].own
    split = layout.granularity
    own_router = made.own_router
    assert choose is not None
    assert own_router is not None

    def gate(layer: int, x_TD: Tensor, hidden_TN: Tensor) -> Tensor:
        own = {name: tensor[layer].to(x_TD.device) for name, tensor in own_router.items()}
        runs_TE = choose(own, x_TD, hidden_TN, layout.active_experts)
        if shares is not None:
            neurons_T = runs_TE.sum(dim=1) * split.expert_size + split.shared_size
            shares.append((neurons_T / split.units).cpu())
        return runs_TE

    return gated(dense, {i: layout.expert_of_neuron_LN[i] for i in layout.moe_layers}, gate)


def active_share(shares: list[Tensor], layers: int) -> dict[str, Any]:
    """Mean share of neurons that run, overall and by layer, and the std of the tokens' means."""
    share_LT = torch.stack([torch.cat(shares[layer::layers]) for layer in range(layers)])
    mean, std = float(share_LT.mean()), float(share_LT.mean(dim=0).std())
    return {"mean": mean, "std": std, "layers": share_LT.mean(dim=1).tolist()}


def state_of(layout: ExpertLayout, device: torch.device) -> AlignState:
    """State whose affinities every solver rounds to the layout's experts, and its routers.

    Raises a `UserError` for static pruning, whose router has no choice to learn.
    """
    if layout.granularity.dropped_size:
        raise UserError("router_steps trains a router, but static pruning has none. Set it to 0.")
    split = layout.granularity
    expert_LN = columns_of(layout.expert_of_neuron_LN, split.num_experts)
    in_order = torch.arange(split.units) // split.expert_size
    expert_LN[: split.first_dense_layers] = in_order.clamp(max=split.num_experts)
    return AlignState(
        affinity_LNE=torch.nn.functional.one_hot(expert_LN, split.columns).float().to(device),
        router_LED=layout.router_LED.to(device),
        target=split.target,
    )
