"""The training of one FFN: Adam on all projections, so that the masked output follows the dense."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dotmoe.common.distributed import (
    gathered,
    gathered_rows,
    is_rank_zero,
    num_ranks,
    rank,
    sum_over_ranks,
    summed_parts,
)
from dotmoe.common.numbers import ceil_div
from dotmoe.common.precision import in_fast_products
from dotmoe.method.layout import DROPPED, ExpertLayout
from dotmoe.method.repair.problem import LayerProblem, tokens_at_once
from dotmoe.method.router import Routing
from dotmoe.method.sparse import SparseFFN
from dotmoe.models.family import Rows
from dotmoe.training.loop import cosine_with_warmup

BATCH = 512
"""Tokens of a step; on a text of fewer tokens than `_MANY_TOKENS` half as many, for more steps."""
_MANY_TOKENS = 50_000
_RATE = 0.02
"""Peak learning rate, as a share of a matrix's root mean square."""
_WARMUP = 0.1
"""Share of the steps in which the rate rises."""
_BETAS = (0.9, 0.99)


class FFNTraining:
    """Training of one FFN under its masks, with fixed routers and weights in float32.

    Each rank trains some neurons of every expert, on the tokens of all ranks. All ranks must call
    each method together.
    """

    def __init__(self, problem: LayerProblem) -> None:
        self.problem = problem
        self.own = _own_neurons(problem.layout, problem.layer)
        routing = Routing(active_experts=self.own.active_experts)
        self.copies = SparseFFN(problem.ffn, self.own, 0, routing).float()
        """Copies of the neurons that this rank trains, in the order of the experts."""
        self.copies.router.requires_grad_(False)
        task = problem.ffn_task
        assert task is not None
        self.inputs_TD = task.inputs_BTD.flatten(0, 1)
        self.wanted_TD = task.wanted_BTD.flatten(0, 1)
        self.weight_T = problem.weight_BT.flatten()
        self.num_fitted = problem.num_fitted * task.inputs_BTD.shape[1]
        """So many tokens of this rank are to fit; the others, behind them, are held out."""

    def loss(self, token_R: Tensor) -> Tensor:
        """Weighted square error, summed over these tokens of all ranks; each gives its own."""
        given = (self.inputs_TD, self.wanted_TD, self.weight_T)
        x_RD, wanted_RD, weight_R = (gathered_rows(self._taken(each, token_R)) for each in given)
        output_RD: Tensor = self.problem.norm(summed_parts(self.copies(x_RD.float())))
        return ((output_RD - wanted_RD).square().sum(1) * weight_R).sum()

    def heldout_loss(self) -> float:
        """The loss on held-out tokens; every rank gets rank zero's, so that all decide alike."""
        heldout_T = torch.arange(self.num_fitted, len(self.inputs_TD), device=self._place)
        at_once = max(1, tokens_at_once(self.copies.gate_ESD.device) // num_ranks())
        with torch.no_grad(), in_fast_products():
            losses = [self.loss(token_R) for token_R in torch.split(heldout_T, at_once)]
        total: float = sum(torch.stack(losses).tolist())  # the only time that the host waits
        return gathered(total)[0]

    def fit(self, epochs: int, generator: torch.Generator) -> None:
        """Run `epochs` passes of Adam over the tokens to fit, in an order that `generator` draws.

        The rate rises to its peak in the first tenth of the steps and falls as a half cosine.
        """
        optimizer = torch.optim.Adam(list(self._groups()), betas=_BETAS, fused=True)
        size = self._batch_size()
        steps = epochs * ceil_div(self.num_fitted, size)
        warmup = round(_WARMUP * steps)
        rate = partial(cosine_with_warmup, total_steps=steps, warmup_steps=warmup)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        with torch.enable_grad(), in_fast_products():
            for _ in range(epochs):
                order_T = torch.randperm(self.num_fitted, generator=generator).to(self._place)
                for token_R in torch.split(order_T, size):
                    mean = self.loss(token_R) / (size * num_ranks())
                    mean.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()

    @torch.no_grad()
    def trained_weights(self) -> dict[str, Tensor]:
        """The FFN's weights in float32 with what all ranks have trained, by name in the model."""
        ffn = self.problem.ffn
        named = dict(self.problem.block.named_parameters())
        weights: dict[Tensor, Tensor] = {
            parameter: parameter.detach().to(torch.float32, copy=True)
            for parameter in named.values()
        }
        rows = (_rows_of(ffn.gate, weights), _rows_of(ffn.up, weights), weights[ffn.down.weight].T)
        is_others_N = self._neurons_of_other_ranks()
        for (_, experts, shared), rows_ND in zip(self.copies.weights(), rows, strict=True):
            rows_ND[self.copies.neurons_ES] = experts
            if shared is not None:
                rows_ND[self.copies.shared_M] = shared
            rows_ND[is_others_N] = 0
            rows_ND.copy_(sum_over_ranks(rows_ND.contiguous()))
        return {f"{self.problem.name}.{name}": weights[named[name]] for name in named}

    @property
    def _place(self) -> torch.device:
        """Where inputs, what is wanted and token weights are: on the device or on the host."""
        return self.inputs_TD.device

    def _taken(self, values_T: Tensor, token_R: Tensor) -> Tensor:
        """Values of some tokens, on the device of the weights."""
        device = self.problem.output.weight.device
        values_R = values_T[token_R]
        if values_T.is_pinned():
            values_R = values_R.pin_memory()
        return values_R.to(device, non_blocking=True)

    def _groups(self) -> Iterator[dict[str, Any]]:
        """The copies of each projection, with its learning rate."""
        ffn = self.problem.ffn
        projections = (ffn.gate, ffn.up, ffn.down)
        for (_, experts, shared), projection in zip(
            self.copies.weights(), projections, strict=True
        ):
            root_mean_square = float(projection.weight.float().square().mean().sqrt())
            trained = [experts] if shared is None else [experts, shared]
            yield {"params": trained, "lr": _RATE * root_mean_square}

    def _batch_size(self) -> int:
        """Tokens of this rank in a step."""
        is_long = self.num_fitted * num_ranks() >= _MANY_TOKENS
        tokens = BATCH if is_long else BATCH // 2
        return max(1, tokens // num_ranks())

    def _neurons_of_other_ranks(self) -> Tensor:
        """Whether this rank leaves a neuron to others, [N]; rank zero keeps those of no expert."""
        is_others_N = self.own.expert_of_neuron_LN[0] == DROPPED
        if is_rank_zero():
            is_others_N &= self.problem.layout.expert_of_neuron_LN[self.problem.layer] != DROPPED
        return is_others_N.to(self.problem.output.weight.device)


def train_ffn(
    problem: LayerProblem, epochs: int, generator: torch.Generator
) -> tuple[dict[str, Tensor], float]:
    """The FFN's weights after the training, by name in the model; and the error that they leave.

    It is a share of the masked dense weights' error on held-out tokens. If these do not gain, there
    are no weights, and the share is 1.
    """
    training = FFNTraining(problem)
    before = training.heldout_loss()
    training.fit(epochs, generator)
    after = training.heldout_loss()
    if not after < before:
        return {}, 1.0
    return training.trained_weights(), after / before


def _rows_of(projection: nn.Linear | Rows, weights: dict[Tensor, Tensor]) -> Tensor:
    """A projection's own rows in other values of its weight."""
    if isinstance(projection, Rows):
        return weights[projection.fused.weight][projection.rows]
    return weights[projection.weight]


def _own_neurons(layout: ExpertLayout, layer: int) -> ExpertLayout:
    """One layer with the neurons that this rank trains, of each expert as many; no others."""
    experts_SE, shared_M = layout.neurons_of_expert(layer).T, layout.shared_neurons(layer)
    own = [each.tensor_split(num_ranks())[rank()].flatten() for each in (experts_SE, shared_M)]
    own_M = torch.cat(own)
    expert_of_N = layout.expert_of_neuron_LN[layer]
    own_N = torch.full_like(expert_of_N, DROPPED).index_copy_(0, own_M, expert_of_N[own_M])
    router_ED = layout.router_LED[layer]
    return replace(layout, expert_of_neuron_LN=own_N[None], router_LED=router_ED[None])
