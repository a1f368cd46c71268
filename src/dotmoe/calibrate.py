"""STAGE calibrate: initial affinities and routers, at random (the paper) or from activations.

The start from data is a method of its own: extracted at once (`--steps 0`) it is a training-free
conversion.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from dotmoe.artifacts import DenseModel
from dotmoe.distributed import Division, mesh
from dotmoe.models.traits import GatedFFN
from dotmoe.moe.assignment import AlignState
from dotmoe.sharded_weights import whole_weights
from dotmoe.transport import balanced_plan, greedy_assignment

Start = Literal["data", "random"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateConfig:
    """Where affinities and routers start."""

    start: Start = "data"
    """`data`: balanced clusters of output contributions and a ridge-regressed router. `random`: the
    paper's."""
    calibration_tokens: int = 8192
    """Tokens whose activations are looked at. Only for the start from data."""
    cluster_iterations: int = 8
    """Rounds of balanced k-means."""
    affinity_std: float = 0.03
    """Standard deviation of the initial affinities."""
    router_std: float = 0.02
    """Standard deviation of the random start's router entries. The start from data instead scales
    its logits to standard deviation 1."""
    ridge: float = 0.01
    """Ridge penalty of the router regression, as a share of the mean input power."""


@torch.no_grad()
def calibrate(
    dense: DenseModel,
    tokens_BT: Tensor,
    num_experts: int,
    config: CalibrateConfig,
    *,
    seed: int,
    on_progress: Progress = lambda done, total: None,
) -> AlignState:
    """Initial `AlignState` for `num_experts` experts a layer.

    Under torchrun every rank runs the forward pass, then each finishes some of the layers: all
    ranks return the state that one rank alone would, bit for bit.

    Args:
        dense: The dense model.
        tokens_BT: Calibration text; read only for the start from data.
        num_experts: E; must divide the FFN width.
        config: See `CalibrateConfig`.
        seed: Of the random numbers; the same seed gives the same state.
        on_progress: Called with (layers done, layers).
    """
    if config.start == "random":
        return _random_start(dense, num_experts, config, seed)
    rows = -(-config.calibration_tokens // tokens_BT.shape[1])
    layers = dense.family.layers(dense.model)
    division = Division(len(layers), mesh(dense.device))
    inputs = ffn_inputs(dense, tokens_BT[:rows], division.own)
    widths, device = dense.widths, dense.device
    affinity_lNE = torch.empty(len(inputs), widths.ffn, num_experts, device=device)
    router_lED = torch.empty(len(inputs), num_experts, widths.model, device=device)
    done = 0
    for turn, indices in enumerate(division.rounds()):
        for index in indices:
            with whole_weights(layers[index]):
                if index == division.own.start + turn:
                    found = contributions(dense.family.ffn(layers[index]), inputs[turn])
        if turn < len(inputs):
            layer_seed = seed + division.own.start + turn
            affinity_lNE[turn], router_lED[turn] = _start_of_layer(
                inputs[turn], found, num_experts, config, seed=layer_seed
            )
        done += len(indices)
        on_progress(done, len(layers))
    return AlignState(
        affinity_LNE=division.gathered(affinity_lNE),
        router_LED=division.gathered(router_lED),
        step=0,
    )


def _start_of_layer(
    x_TD: Tensor,
    contribution_TN: Tensor,
    num_experts: int,
    config: CalibrateConfig,
    *,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Affinities [N, E] and router rows [E, D] of one layer."""
    affinity_NE = cluster_affinity(contribution_TN, num_experts, config, seed=seed)
    expert_of_neuron_N = harden(affinity_NE)
    energy_TE = torch.zeros(len(x_TD), num_experts, device=x_TD.device)
    energy_TE.index_add_(1, expert_of_neuron_N, contribution_TN.square())
    router_ED = ridge_router(x_TD.float(), energy_TE, config.ridge)
    return affinity_NE * (config.affinity_std / affinity_NE.std()), router_ED


def ffn_inputs(dense: DenseModel, tokens_BT: Tensor, which: slice = slice(None)) -> list[Tensor]:
    """Input of the FFN of each layer, [T, D] a layer in the model's dtype, on the model's device.

    Args:
        dense: The dense model; one that is sharded must be run by every rank.
        tokens_BT: Text.
        which: Layers whose inputs are kept.
    """
    captured: list[list[Tensor]] = []
    hooks = []
    for layer in dense.family.layers(dense.model)[which]:
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


def harden(affinity_NE: Tensor, relative_tau: float = 0.1) -> Tensor:
    """Balanced assignment of affinities of any scale: transport at a tenth of their spread."""
    tau = float(affinity_NE.std()) * relative_tau
    capacity = affinity_NE.shape[0] // affinity_NE.shape[1]
    plan = balanced_plan(affinity_NE, capacity=capacity, tau=tau, tolerance=1e-3).plan
    return greedy_assignment(plan, capacity=capacity)


def ridge_router(
    x_TD: Float[Tensor, "T D"], energy_TE: Float[Tensor, "T E"], ridge: float
) -> Float[Tensor, "E D"]:
    """Router rows that predict each expert's share of the contribution energy of a token.

    Least squares from the FFN input with a ridge penalty. Rows are centred over experts, which
    changes no routing, and scaled so that logits have standard deviation 1.
    """
    share_TE = energy_TE.sqrt()
    share_TE = share_TE / share_TE.sum(dim=1, keepdim=True)
    target_TE = share_TE - share_TE.mean(dim=1, keepdim=True)
    gram_DD = x_TD.T @ x_TD
    gram_DD.diagonal().add_(ridge * gram_DD.diagonal().mean())
    router_ED = torch.linalg.solve(gram_DD, x_TD.T @ target_TE).T
    router_ED = router_ED - router_ED.mean(dim=0)
    scaled: Tensor = router_ED / (x_TD @ router_ED.T).std()
    return scaled


def _random_start(
    dense: DenseModel, num_experts: int, config: CalibrateConfig, seed: int
) -> AlignState:
    widths = dense.widths
    device = next(dense.model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    affinity = torch.randn(widths.layers, widths.ffn, num_experts, generator=generator)
    router = torch.randn(widths.layers, num_experts, widths.model, generator=generator)
    return AlignState(
        affinity_LNE=(affinity * config.affinity_std).to(device),
        router_LED=(router * config.router_std).to(device),
        step=0,
    )
