"""STAGE calibrate: initial affinities and routers, at random (the paper) or from activations."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dotmoe.common.distributed import num_ranks
from dotmoe.common.errors import UserError
from dotmoe.common.files import is_finite
from dotmoe.common.precision import in_float32
from dotmoe.common.progress import Update, no_update
from dotmoe.common.seeds import generator_for
from dotmoe.method.assignment import assigned
from dotmoe.method.config import AssignmentConfig, CalibrateConfig
from dotmoe.method.granularity import Granularity
from dotmoe.method.layout import columns_of
from dotmoe.method.masked import sums_by_expert
from dotmoe.method.router import router_logits, top_k_mask
from dotmoe.method.state import AlignState
from dotmoe.models.checkpoint import dtype_name
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.family import GatedFFN
from dotmoe.models.hooks import input_hooks
from dotmoe.models.load import whole_weights
from dotmoe.models.stream import TOKENS_AT_ONCE, Stream
from dotmoe.models.targets import TARGETS
from dotmoe.text.blocks import TokenBlocks

_TINY = 1e-30
_AFFINITY_STD, _ROUTER_STD = 0.03, 0.02
"""Standard deviations of initial affinities, and of the random start's router entries; the start
from data instead scales its logits to standard deviation 1."""
START_TEMPERATURE = 0.01
"""Temperature of the transport in the start from data, in standard deviations of its affinities."""
START_ROUNDS = 10
"""Rounds of the start from data; each updates the router and then the experts."""


@torch.no_grad()
def calibrate(
    dense: DenseModel,
    blocks: TokenBlocks,
    split: Granularity,
    config: CalibrateConfig,
    assignment: AssignmentConfig,
    *,
    seed: int,
    on_progress: Update = no_update,
) -> AlignState:
    """Initial `AlignState` for the experts of `split`.

    Under torchrun every rank computes all layers, and all return the state of rank 0. The text is
    read only for the start from data. Raises a `UserError` as `RidgeRouter` does, and if a layer
    overflows its dtype.
    """
    widths = dense.widths
    if config.start == "random":
        generator = generator_for(seed, split.target)
        affinity_LNF, router_LED = _random_start(dense, split, generator, widths.layers)
    else:
        affinities, routers = [], []
        tokens_BT = blocks.drawn(config.tokens(widths.model))
        for index, (x_TD, energy) in enumerate(block_inputs(dense, tokens_BT, split.target)):
            generator = generator_for(seed, split.target, index)
            affinity_NF, router_ED = _start_from_data(
                dense, x_TD, energy(), split, config, assignment, generator
            )
            affinities.append(affinity_NF)
            routers.append(router_ED)
            on_progress(index + 1, widths.layers)
        affinity_LNF, router_LED = torch.stack(affinities), torch.stack(routers)
    if num_ranks() > 1:
        torch.distributed.broadcast(affinity_LNF, src=0)
        torch.distributed.broadcast(router_LED, src=0)
    return AlignState(affinity_LNE=affinity_LNF, router_LED=router_LED, target=split.target)


def _random_start(
    dense: DenseModel, split: Granularity, generator: torch.Generator, *layers: int
) -> tuple[Float[Tensor, "*L N F"], Float[Tensor, "*L E D"]]:
    """Normal affinities and routers, of one layer or of so many."""
    affinity = torch.randn(*layers, split.units, split.columns, generator=generator)
    router = torch.randn(*layers, split.num_experts, dense.widths.model, generator=generator)
    return (affinity * _AFFINITY_STD).to(dense.device), (router * _ROUTER_STD).to(dense.device)


def _start_from_data(
    dense: DenseModel,
    x_TD: Tensor,
    energy_TN: Tensor,
    split: Granularity,
    config: CalibrateConfig,
    assignment: AssignmentConfig,
    generator: torch.Generator,
) -> tuple[Float[Tensor, "N F"], Float[Tensor, "E D"]]:
    """Affinities that round to the experts of `router_aware_start`, and its router.

    A block without output, such as a zeroed one, starts at random. `energy_TN` is overwritten, to
    hold no second tensor of its size.
    """
    if not bool(energy_TN.any()):
        return _random_start(dense, split, generator)
    share_TN = energy_TN.div_(energy_TN.sum(dim=1, keepdim=True).clamp_min(_TINY))
    expert_N, router_ED = router_aware_start(x_TD, share_TN, split, config, assignment, generator)
    affinity_NF = F.one_hot(expert_N, split.columns).float()
    return affinity_NF * (_AFFINITY_STD / affinity_NF.std()), router_ED


@torch.no_grad()
def block_inputs(
    dense: DenseModel,
    tokens_BT: Tensor,
    target: str = "ffn",
    converted: Callable[[int], AbstractContextManager[None]] | None = None,
) -> Iterator[tuple[Tensor, Callable[[], Float[Tensor, "T N"]]]]:
    """Yield the input of each layer's FFN or attention in turn, [T, D] in the model's dtype.

    Each input comes with a function that returns the square of each unit's contribution to the
    output, in float32; call it before asking for the next layer, until which the layer's weights
    are whole. Memory holds one layer's input and the residual stream of the text. If `converted` is
    given, the next layer reads what this layer computes within `converted(index)`, which is entered
    after the layer's input is yielded. If the model is sharded, every rank must call this.
    """
    stream = Stream(dense, tokens_BT)
    part = TARGETS[target]
    for index, layer in enumerate(dense.family.layers(dense.model)):
        # Inputs of the block and of its output projection, part by part of the text.
        inputs, heads = list[Tensor](), list[Tensor]()
        places = {0: dense.family.block(layer, part)}
        if target == "attention":
            places[1] = dense.family.output(layer, part)
        keep = partial(_keep, (inputs, heads))
        with whole_weights(dense, index):
            # The stream itself advances below, behind the converted layer.
            passing = stream if converted is None else stream.clone()
            with input_hooks(places, keep):
                passing.advance(index)
            del passing  # which takes memory
            x_TD = torch.cat(inputs)
            yield x_TD, partial(_finite_energy, dense, index, x_TD, heads)
            if converted is not None:
                with converted(index):
                    stream.advance(index)


def _keep(kept: tuple[list[Tensor], ...], place: int, x: Tensor) -> None:
    kept[place].append(x.flatten(0, -2))


def _finite_energy(
    dense: DenseModel, index: int, x_TD: Tensor, heads: list[Tensor]
) -> Float[Tensor, "T N"]:
    """`_energy` of a layer by its number; a `UserError` if it overflows the model's dtype."""
    energy_TN = _energy(dense, dense.family.layers(dense.model)[index], x_TD, heads)
    require_finite_layer(energy_TN, index, x_TD.dtype)
    return energy_TN


def require_finite_layer(computed: Tensor, index: int, dtype: torch.dtype) -> None:
    """Refuse a layer that overflows its dtype on the text of the calibration."""
    if not is_finite(computed):
        remedy = "Choose --dtype float32."
        if dtype == torch.float32:
            remedy = "Its weights are damaged: compare the model with the original."
        raise UserError(
            f"layer {index} computes NaN or infinity in {dtype_name(dtype)} on the text of the "
            f"calibration. {remedy}"
        )


@in_float32()
def _energy(
    dense: DenseModel, layer: nn.Module, x_TD: Tensor, heads: list[Tensor]
) -> Float[Tensor, "T N"]:
    """Square of each unit's contribution; units are query heads if their outputs are given."""
    attention = TARGETS["attention"]
    if not heads:
        return contributions(dense.family.ffn(layer), x_TD).square_()
    num_heads = attention.units(dense.config)
    weight_DH = dense.family.output(layer, attention).weight
    columns_NDC = weight_DH.float().view(len(weight_DH), num_heads, -1).transpose(0, 1)
    gram_NCC = columns_NDC.transpose(1, 2) @ columns_NDC
    energies = []
    for part_TH in heads:
        heads_TNC = part_TH.float().view(len(part_TH), num_heads, -1)
        energies.append(torch.einsum("tnc,ncd,tnd->tn", heads_TNC, gram_NCC, heads_TNC))
    return torch.cat(energies).clamp_min_(0)


def contributions(ffn: GatedFFN, x_TD: Tensor) -> Float[Tensor, "T N"]:
    """Size of each neuron's term in the FFN output: |H[t, n]| * ||W_down[:, n]||, float32."""
    norm_N: Tensor = ffn.down.weight.float().norm(dim=0)
    size_TN = norm_N.new_empty(len(x_TD), len(norm_N))
    for first in range(0, len(x_TD), TOKENS_AT_ONCE):
        here = slice(first, first + TOKENS_AT_ONCE)
        torch.mul(ffn.hidden(x_TD[here]).float().abs(), norm_N, out=size_TN[here])
    return size_TN


def routed_sums(
    values_TN: Float[Tensor, "T N"], expert_of_neuron_N: Int[Tensor, " N"], num_experts: int
) -> Float[Tensor, "T E"]:
    """Sum over the neurons of each expert; those always on or dropped are left out."""
    # One more column takes all neurons of no expert.
    column_N = columns_of(expert_of_neuron_N, num_experts).clamp(max=num_experts)
    return sums_by_expert(values_TN, column_N, num_experts + 1)[:, :num_experts]


def router_aware_start(
    x_TD: Float[Tensor, "T D"],
    share_TN: Float[Tensor, "T N"],
    split: Granularity,
    config: CalibrateConfig,
    assignment: AssignmentConfig,
    generator: torch.Generator,
) -> tuple[Int[Tensor, " N"], Float[Tensor, "E D"]]:
    """Experts and router of a layer, from its inputs and each unit's share P of a token's energy.

    Two steps alternate from a random split: fit the ridge router of the current experts, and assign
    by A = P^T R (`assigned`), where R is the hard top-k mask of that router (eq:router_topk).
    A neuron's score for an expert is the sum of its shares over the tokens that run the expert: the
    gradient of eq:assignment_ste if the loss is the mean share left out. A shared expert, number E,
    is one more column, of ones in R: it starts with the neurons of largest mean share, and ends
    with the neurons whose energy routing would lose most.
    """
    order_N = share_TN.mean(dim=0).argsort(descending=True, stable=True)
    routed_M = order_N[split.shared_size :].sort().values
    first_M = torch.randperm(len(routed_M), generator=generator)
    expert_N = torch.full_like(order_N, split.num_experts)
    expert_N[routed_M] = (first_M // split.expert_size).to(expert_N.device)

    fitted = RidgeRouter(x_TD, config.ridge)

    def router() -> Tensor:
        return fitted(log_energy(routed_sums(share_TN, expert_N, split.num_experts)))

    for _ in range(START_ROUNDS):
        mask_TE = top_k_mask(router_logits(x_TD, router()), split.active_experts)
        mask_TE = F.pad(mask_TE, (0, split.columns - split.num_experts), value=1)
        affinity_NE = share_TN.T @ mask_TE
        expert_N = assigned(assignment, affinity_NE, split.capacity, relative_tau=START_TEMPERATURE)
    return expert_N, router()


def log_energy(energy_TE: Float[Tensor, "T E"]) -> Float[Tensor, "T E"]:
    """Half the log of each expert's share (at least 1e-9) of a token's energy, in float64."""
    share_TE = energy_TE.double() / energy_TE.double().sum(dim=1, keepdim=True).clamp_min(_TINY)
    return 0.5 * share_TE.clamp_min(1e-9).log()


class RidgeRouter:
    """Fits router rows that predict how the targets of a token differ from their mean.

    Ridge regression by normal equations in float64, factorised once for any number of targets.
    Raises a `UserError` if the equations have no solution.
    """

    def __init__(self, x_TD: Float[Tensor, "T D"], ridge: float) -> None:
        self._x_TD = x_TD.double()
        gram_DD = self._x_TD.T @ self._x_TD
        gram_DD.diagonal().add_(ridge * gram_DD.diagonal().mean())
        self._factor_DD, failed = torch.linalg.cholesky_ex(gram_DD)
        if failed:
            raise UserError(
                f"ridge is {ridge:g}, with which no router can be fitted to {len(x_TD)} tokens: "
                "they are too few, or not finite. Raise ridge or calibration_tokens, or choose "
                "--dtype float32."
            )

    def __call__(self, target_TE: Float[Tensor, "T E"]) -> Float[Tensor, "E D"]:
        """Fit router rows to the targets; `unit_logits` centres and scales them."""
        target_TE = target_TE.double() - target_TE.double().mean(dim=1, keepdim=True)
        router_DE = torch.cholesky_solve(self._x_TD.T @ target_TE, self._factor_DD)
        return unit_logits(router_DE.T, self._x_TD)


def unit_logits(router_ED: Float[Tensor, "E D"], x_TD: Float[Tensor, "T D"]) -> Tensor:
    """Rows centred over experts and scaled to logits of standard deviation 1; routing is kept."""
    centred_ED = router_ED - router_ED.mean(dim=0)
    return (centred_ED / (x_TD @ centred_ED.T).std().clamp_min(_TINY)).float()
