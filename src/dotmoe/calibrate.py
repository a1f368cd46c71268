"""STAGE calibrate: initial affinities and routers, at random (the paper) or from activations.

The start from data is a method of its own: extracted at once (`--steps 0`) it is a training-free
conversion.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dotmoe.distributed import num_ranks
from dotmoe.models.dense import DenseModel
from dotmoe.models.traits import GatedFFN
from dotmoe.moe.assignment import AlignState
from dotmoe.options import above, at_least
from dotmoe.progress import Update, no_update
from dotmoe.sharded_weights import whole_weights
from dotmoe.transport import balanced_plan, greedy_assignment

Start = Literal["data", "random"]

_TINY = 1e-30


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateConfig:
    """Where affinities and routers start."""

    start: Start = "data"
    """`data`: balanced clusters of output contributions and a ridge-regressed router. `random`: the
    paper's."""
    calibration_tokens: Annotated[int, at_least(1)] = 8192
    """Tokens whose activations are looked at. Only for the start from data."""
    cluster_iterations: Annotated[int, at_least(0)] = 8
    """Rounds of balanced k-means."""
    affinity_std: Annotated[float, above(0)] = 0.03
    """Standard deviation of the initial affinities."""
    router_std: Annotated[float, at_least(0)] = 0.02
    """Standard deviation of the random start's router entries. The start from data instead scales
    its logits to standard deviation 1."""
    ridge: Annotated[float, above(0)] = 0.01
    """Ridge penalty of the router regression, as a share of the mean input power."""


@torch.no_grad()
def calibrate(
    dense: DenseModel,
    tokens_BT: Tensor,
    num_experts: int,
    config: CalibrateConfig,
    *,
    seed: int,
    on_progress: Update = no_update,
) -> AlignState:
    """Initial `AlignState` for `num_experts` experts a layer.

    Under torchrun every rank computes all layers, and all return the state of rank 0.

    Args:
        dense: The dense model.
        tokens_BT: Calibration text; read only for the start from data.
        num_experts: E; must divide the FFN width.
        config: See `CalibrateConfig`.
        seed: Of the random numbers; the same seed gives the same state.
        on_progress: Called with (layers done, layers).
    """
    if config.start == "random":
        widths, generator = dense.widths, torch.Generator().manual_seed(seed)
        shape = torch.Size((widths.layers, widths.ffn, num_experts))
        affinity_LNE, router_LED = _random_start(
            shape, widths.model, config, generator, dense.device
        )
        return AlignState(affinity_LNE=affinity_LNE, router_LED=router_LED, step=0)
    rows = -(-config.calibration_tokens // tokens_BT.shape[1])
    layers = dense.family.layers(dense.model)
    starts = []
    for index, x_TD in enumerate(ffn_inputs(dense, tokens_BT[:rows])):
        with whole_weights(layers[index]):
            contribution_TN = contributions(dense.family.ffn(layers[index]), x_TD)
        starts.append(_start_of_layer(x_TD, contribution_TN, num_experts, config, seed + index))
        on_progress(index + 1, len(layers))
    affinity_LNE, router_LED = (torch.stack(parts) for parts in zip(*starts, strict=True))
    if num_ranks() > 1:
        torch.distributed.broadcast(affinity_LNE, src=0)
        torch.distributed.broadcast(router_LED, src=0)
    return AlignState(affinity_LNE=affinity_LNE, router_LED=router_LED, step=0)


def _start_of_layer(
    x_TD: Tensor, contribution_TN: Tensor, num_experts: int, config: CalibrateConfig, seed: int
) -> tuple[Tensor, Tensor]:
    """Affinities [N, E] and router rows [E, D] of one layer."""
    affinity_NE = cluster_affinity(contribution_TN, num_experts, config, seed=seed)
    spread = float(affinity_NE.std())
    if spread == 0:  # an FFN whose contributions never change, such as a zeroed one
        generator = torch.Generator().manual_seed(seed)
        return _random_start(affinity_NE.shape, x_TD.shape[1], config, generator, x_TD.device)
    energy_TE = expert_sums(contribution_TN.square(), harden(affinity_NE), num_experts)
    router_ED = ridge_router(x_TD, energy_TE, config.ridge)
    return affinity_NE * (config.affinity_std / spread), router_ED


def expert_sums(
    values_TN: Float[Tensor, "T N"], expert_of_neuron_N: Int[Tensor, " N"], num_experts: int
) -> Float[Tensor, "T E"]:
    """Sum over the neurons of each expert; neurons that are always on are left out."""
    sums_TE = values_TN.new_zeros(len(values_TN), num_experts + 1)
    sums_TE.index_add_(1, expert_of_neuron_N % (num_experts + 1), values_TN)
    return sums_TE[:, :num_experts]


def ffn_inputs(dense: DenseModel, tokens_BT: Tensor) -> list[Tensor]:
    """Input of the FFN of each layer, [T, D] a layer in the model's dtype, on the model's device.

    Args:
        dense: The dense model; one that is sharded must be run by every rank.
        tokens_BT: Text.
    """
    captured: list[list[Tensor]] = []
    hooks = []
    for layer in dense.family.layers(dense.model):
        bucket: list[Tensor] = []
        captured.append(bucket)
        ffn = layer.get_submodule("mlp")
        hooks.append(ffn.register_forward_pre_hook(_keep_input(bucket)))
    trunk = dense.family.trunk(dense.model)
    try:
        with torch.no_grad():
            for rows in torch.split(tokens_BT, 4):
                trunk(input_ids=rows.to(dense.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(bucket) for bucket in captured]


def _keep_input(bucket: list[Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        bucket.append(args[0].reshape(-1, args[0].shape[-1]))

    return hook


def contributions(ffn: GatedFFN, x_TD: Tensor) -> Float[Tensor, "T N"]:
    """Size of each neuron's term in the FFN output: |H[t, n]| * ||W_down[:, n]||, float32."""
    hidden = F.silu(ffn.gate(x_TD)) * ffn.up(x_TD)
    size: Tensor = hidden.float().abs() * ffn.down.weight.float().norm(dim=0)
    return size


def cluster_affinity(
    contribution_TN: Tensor, num_experts: int, config: CalibrateConfig, *, seed: int
) -> Float[Tensor, "N E"]:
    """Cosine similarity of each neuron to the centres of balanced clusters of neurons.

    Neurons are described by their contributions over the calibration tokens, centred and of unit
    length; the assignment step of the k-means is the balanced transport itself.
    """
    features_NT = F.normalize(
        contribution_TN.T - contribution_TN.T.mean(dim=1, keepdim=True), dim=1
    )
    generator = torch.Generator().manual_seed(seed)
    first = torch.randperm(len(features_NT), generator=generator)[:num_experts]
    centres_ET = features_NT[first.to(features_NT.device)]
    for _ in range(config.cluster_iterations):
        expert_of_neuron_N = harden(features_NT @ centres_ET.T)
        centres_ET = torch.zeros_like(centres_ET)
        centres_ET.index_add_(0, expert_of_neuron_N, features_NT)
        centres_ET = F.normalize(centres_ET, dim=1)
    return features_NT @ centres_ET.T


def harden(affinity_NE: Tensor, relative_tau: float = 0.1) -> Int[Tensor, " N"]:
    """Balanced assignment of affinities of any scale: transport at a tenth of their spread."""
    capacity = affinity_NE.shape[0] // affinity_NE.shape[1]
    tau = float(affinity_NE.std()) * relative_tau
    if tau == 0:
        return torch.arange(len(affinity_NE), device=affinity_NE.device) // capacity
    plan = balanced_plan(affinity_NE, capacity=capacity, tau=tau, tolerance=1e-3).plan
    return greedy_assignment(plan, capacity=capacity)


def ridge_router(
    x_TD: Float[Tensor, "T D"], energy_TE: Float[Tensor, "T E"], ridge: float
) -> Float[Tensor, "E D"]:
    """Router rows that predict each expert's share of the contribution energy of a token.

    Least squares from the FFN input with a ridge penalty, by normal equations in float64. Rows are
    centred over experts, which changes no routing, and scaled so that logits have standard
    deviation 1. Float32.
    """
    x_TD, share_TE = x_TD.double(), energy_TE.double().sqrt()
    share_TE = share_TE / share_TE.sum(dim=1, keepdim=True).clamp_min(_TINY)
    target_TE = share_TE - share_TE.mean(dim=1, keepdim=True)
    gram_DD = x_TD.T @ x_TD
    gram_DD.diagonal().add_(ridge * gram_DD.diagonal().mean())
    router_ED = torch.linalg.solve(gram_DD, x_TD.T @ target_TE).T
    return unit_logits(router_ED, x_TD)


def unit_logits(router_ED: Float[Tensor, "E D"], x_TD: Float[Tensor, "T D"]) -> Tensor:
    """Rows centred over experts and scaled to logits of standard deviation 1, float32.

    Neither changes which experts run.
    """
    centred_ED = router_ED - router_ED.mean(dim=0)
    scaled: Tensor = centred_ED / (x_TD @ centred_ED.T).std().clamp_min(_TINY)
    return scaled.float()


def _random_start(
    shape: torch.Size,
    width: int,
    config: CalibrateConfig,
    generator: torch.Generator,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Normal affinities of a shape [..., N, E], and router rows [..., E, D] of a model width."""
    affinity = torch.randn(shape, generator=generator) * config.affinity_std
    router = torch.randn(*shape[:-2], shape[-1], width, generator=generator) * config.router_std
    return affinity.to(device), router.to(device)
