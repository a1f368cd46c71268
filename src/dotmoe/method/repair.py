"""Repair by layers: train the FFNs under the masks, or refit W_down or W_O in closed form."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor, nn

from dotmoe.common.distributed import (
    broadcast_from_rank_zero,
    gathered,
    gathered_rows,
    in_fast_products,
    in_float32,
    is_rank_zero,
    num_ranks,
    raise_on_all_ranks,
    rank,
    sum_over_ranks,
    summed_parts,
)
from dotmoe.common.errors import UserError
from dotmoe.common.files import complete_folder, read_json, save_tensors, write_json
from dotmoe.common.progress import Update, no_update
from dotmoe.method.config import RepairConfig
from dotmoe.method.granularity import Splits
from dotmoe.method.layout import DROPPED, ExpertLayout, Layouts, save_layouts, splits_in
from dotmoe.method.masked import Masking, masked, maskings_of
from dotmoe.method.router import Routing
from dotmoe.method.sparse import SparseFFN
from dotmoe.models.checkpoint import CHANGED, Tensors
from dotmoe.models.family import TARGETS, TOKENS_AT_ONCE, DenseModel, GatedFFN, Stream, Target
from dotmoe.models.hooks import computing
from dotmoe.models.load import CHANGES, whole_weights
from dotmoe.text.blocks import TokenBlocks
from dotmoe.training.loop import cosine_with_warmup

METRICS = "repair.json"
"""Metrics: the stage's, and each layer's beside its weights."""
RIDGES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0)
"""Penalties to try, as shares of the mean diagonal of the Gram matrix."""
SOLUTIONS = 4
"""Solutions that a layer usually takes: three near the last layer's penalty, and the final one."""
_TOKENS_AN_INPUT, HELD_OUT, _LARGEST_WEIGHT, _COLUMNS = 40, 8, 10.0, 2_048
"""Default tokens an input; one row of so many is held out; a token's largest weight; and columns
of the Gram matrix that are summed at once on a GPU."""
_SORTED_AT_ONCE = 1024
"""Tokens that experts run on at once: a CPU gets memory for the rows of more anew each time."""
_KEPT = 0.8
"""Share of what training changed that the export keeps: with all of it, SmolLM2 loses more on every
text (docs/dev/decisions.md). Later layers are trained behind the whole change."""
BATCH, _MANY_TOKENS, _RATE, _WARMUP = 512, 50_000, 0.02, 0.1
"""Training: tokens per step (half of it on a text of fewer tokens than `_MANY_TOKENS`), peak
learning rate as a share of a matrix's root mean square, and share of the steps that warm up."""


def repair_tokens(config: RepairConfig, splits: Splits, dense_config: Any) -> int:
    """Number of tokens: `repair_tokens`, or the default for the projections of these splits."""
    inputs = [TARGETS[split.target].inputs(dense_config) for split in splits]
    return config.repair_tokens or _TOKENS_AN_INPUT * max(inputs)


class NormalEquations:
    """Weighted sums over tokens for dW = argmin sum_t w_t ||z_t dW - r_t||^2, in float64.

    `expert_of_N` has the expert of each column of z, a number from 0. Where an expert does not run,
    its columns are zero: with `by_expert`, for a CPU, the sums leave them out. Inside, columns are
    in the order of the experts, and of z^T z there is the upper triangle, by groups of columns.
    """

    def __init__(self, expert_of_N: Tensor, width: int, *, by_expert: bool) -> None:
        zeros = partial(torch.zeros, dtype=torch.float64, device=expert_of_N.device)
        self._order_N, self._by_expert = expert_of_N.argsort(stable=True), by_expert
        self._bounds = [*range(0, len(expert_of_N), _COLUMNS), len(expert_of_N)]
        if by_expert:
            self._bounds = [0, *expert_of_N.bincount().cumsum(0).tolist()]
        self.gram_NN, self.cross_ND = zeros(2 * expert_of_N.shape), zeros(len(expert_of_N), width)
        self.missing = zeros(())

    @in_float32()
    def add(self, hidden_TN: Tensor, missing_TD: Tensor, weight_T: Tensor) -> None:
        """Add tokens: masked activations z, what the output lacks (r), and weights w; float32."""
        hidden_TN = hidden_TN.index_select(1, self._order_N)
        weighted_TD = missing_TD * weight_T[:, None]
        self.missing += (missing_TD * weighted_TD).sum()
        for start, end in pairwise(self._bounds):
            rows_TN, rows_TD, rows_T = hidden_TN[:, start:], weighted_TD, weight_T
            if self._by_expert:
                row_R = rows_TN[:, : end - start].any(1).nonzero().squeeze(1)
                rows_TN, rows_TD, rows_T = (
                    each.index_select(0, row_R) for each in (rows_TN, rows_TD, rows_T)
                )
            group_TS = rows_TN[:, : end - start]
            self.cross_ND[start:end] += group_TS.T @ rows_TD
            self.gram_NN[start:end, start:] += (group_TS * rows_T[:, None]).T @ rows_TN

    def sum_over_ranks(self) -> None:
        """Add the sums of all ranks, which must call this together; all have them afterwards."""
        for sums in (self.gram_NN, self.cross_ND, self.missing):
            sum_over_ranks(sums)

    def solved(self, ridge: float) -> Float[Tensor, "N D"]:
        """The solution with a penalty on its square: `ridge` (above 0) times the mean diagonal."""
        penalised_NN = self.gram_NN.clone()
        penalised_NN.diagonal().add_(ridge * self.gram_NN.diagonal().mean())
        factor_NN, failed = torch.linalg.cholesky_ex(penalised_NN, upper=True)
        if failed:  # nothing ran, or nothing is finite: there is nothing to fit
            return torch.zeros_like(self.cross_ND)
        solution_ND = torch.cholesky_solve(self.cross_ND, factor_NN, upper=True)
        return torch.empty_like(solution_ND).index_copy_(0, self._order_N, solution_ND)

    def error(self, change_ND: Tensor) -> float:
        """Weighted square error with dW, as a share of that with 0: below 1 is a gain."""
        change_ND, diagonal_N1 = change_ND[self._order_N], self.gram_NN.diagonal()[:, None]
        twice_ND = 2 * (self.gram_NN.triu() @ change_ND) - diagonal_N1 * change_ND
        change = ((twice_ND - 2 * self.cross_ND) * change_ND).sum()
        return float(1 + change / self.missing) if self.missing else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProblem:
    """One FFN or attention under its masks, and what its output lacks to follow the dense model."""

    layer: int
    target: Target
    block: nn.Module
    """The FFN or attention; it runs masked."""
    name: str
    """The block's name in the model."""
    ffn: GatedFFN
    """The layer's FFN with its projections apart."""
    layout: ExpertLayout
    output: nn.Linear
    """The block's output projection."""
    output_name: str
    """Name of its weight in the model."""
    norm: nn.Module
    """The norm (or identity) between the block and the stream, before a residual multiplier."""
    expert_of_N: Tensor
    """Expert of each input of the output projection, a number from 0."""
    x_TD: Tensor
    """Inputs of the FFN, on the CPU; the first `num_fitted` are to fit, the others held out.

    Each rank has tokens of its own, as many as the others.
    """
    wanted_TD: Tensor
    """What the FFN, with its norm, should give, on the CPU."""
    weight_T: Tensor
    num_fitted: int


def refit(
    output: nn.Linear, fitted: NormalEquations, heldout: NormalEquations, near: float | None = None
) -> tuple[Tensor, float | None, float]:
    """The output projection, [D, N], fitted to all tokens with the penalty best for held-out ones.

    Without `near` all of `RIDGES` are tried; else the search begins there and goes on while a
    neighbour is better, because each costs a factorisation of the Gram matrix. Returns also the
    penalty, and the held-out error as of `NormalEquations.error` when only the others are fitted;
    the projection as it is, None and 1 if no penalty gains.
    """
    errors, best = dict[int, float](), 0 if near is None else RIDGES.index(near)
    left = [best, best + 1, best - 1] if near else [*range(len(RIDGES))]
    while left:
        index = left.pop(0)
        if index in errors or index not in range(len(RIDGES)):
            continue
        errors[index] = heldout.error(fitted.solved(RIDGES[index]))
        if index == best or errors[index] < errors[best]:
            best = index
            left += [index + 1, index - 1]
    before_DN = output.weight.double()
    if not errors[best] < 1:
        return before_DN, None, 1.0
    fitted.gram_NN += heldout.gram_NN
    fitted.cross_ND += heldout.cross_ND
    return before_DN + fitted.solved(RIDGES[best]).T, RIDGES[best], errors[best]


def train(problem: LayerProblem, epochs: int) -> tuple[dict[str, Tensor], float]:
    """An FFN's weights after `epochs` passes of Adam over the tokens to fit, by name in the model.

    Each rank trains some neurons of every expert, on the tokens of all ranks, and gets all weights.
    Returns also the share of the error on held-out tokens that they leave; no weights and 1 if they
    do not gain.
    """
    num, device = problem.num_fitted, problem.weight_T.device
    x_TD, wanted_TD = _near(device, problem.x_TD, problem.wanted_TD)

    def error(rows_T: Tensor) -> Tensor:
        given = (x_TD[rows_T], wanted_TD[rows_T], problem.weight_T[rows_T.to(device)])
        read_TD, target_TD, weight_T = (gathered_rows(each.to(device)) for each in given)
        output_TD: Tensor = problem.norm(summed_parts(sparse(read_TD.float())))
        return ((output_TD - target_TD).square().sum(1) * weight_T).sum()

    def heldout_error() -> float:
        parts = torch.split(torch.arange(num, len(x_TD)), max(1, _SORTED_AT_ONCE // ranks))
        return gathered(sum(float(error(rows_T)) for rows_T in parts))[0]  # ranks decide alike

    own = dict(problem.block.named_parameters())
    new = {id(weight): weight.detach().to(torch.float32, copy=True) for weight in own.values()}
    ffn = copy.deepcopy(problem.ffn, new)  # with these copies of its weights
    ranks, part = num_ranks(), _own_neurons(problem.layout, problem.layer)
    sparse = SparseFFN(ffn, part, 0, Routing(active_experts=part.active_experts))
    sparse.router.requires_grad_(False)
    before = heldout_error()
    groups, rows = list[dict[str, Any]](), [ffn.gate.weight, ffn.up.weight, ffn.down.weight.T]
    for (_, *parts), rows_ND in zip(sparse.weights(), rows, strict=True):
        rate = _RATE * float(rows_ND.square().mean().sqrt())
        groups.append({"params": [part for part in parts if part is not None], "lr": rate})
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99), fused=True)
    batch = BATCH if num * ranks >= _MANY_TOKENS else BATCH // 2  # else steps are too few
    batch = max(1, batch // ranks)
    steps = epochs * (a_pass := math.ceil(num / batch))
    warmed = partial(cosine_with_warmup, total_steps=steps, warmup_steps=round(_WARMUP * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmed)
    generator = torch.Generator().manual_seed(problem.layer)
    for step in range(steps):
        if step % a_pass == 0:
            batches = torch.split(torch.randperm(num, generator=generator), batch)
        with torch.enable_grad():
            loss = error(batches[step % a_pass]) / (batch * ranks)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    if not (after := heldout_error()) < before:
        return {}, 1.0
    is_others_N = part.expert_of_neuron_LN[0] == DROPPED
    if is_rank_zero():  # which gives all ranks the neurons that no expert has
        is_others_N &= problem.layout.expert_of_neuron_LN[problem.layer] != DROPPED
    _put_back(sparse, rows, is_others_N.to(device))
    weights = {f"{problem.name}.{name}": new[id(weight)] for name, weight in own.items()}
    return weights, after / before


def _near(device: torch.device, *held: Tensor) -> tuple[Tensor, ...]:
    """The tensors on a GPU if they take at most half of its free memory, else where they are."""
    # A step reads a few rows: they would come over the link as slowly as the step computes.
    size = sum(each.nbytes for each in held)
    fits = device.type == "cuda" and 2 * size <= torch.cuda.mem_get_info(device)[0]
    return tuple(each.to(device) for each in held) if fits else held


def _put_back(sparse: SparseFFN, rows: list[Tensor], is_others_N: Tensor) -> None:
    """Write the neurons of all ranks into the rows, [N, D], of gate, up and down."""
    for (_, experts, shared), rows_ND in zip(sparse.weights(), rows, strict=True):
        rows_ND[sparse.neurons_ES] = experts
        if shared is not None:
            rows_ND[sparse.shared_M] = shared
        rows_ND[is_others_N] = 0
        rows_ND.copy_(sum_over_ranks(rows_ND.contiguous()))


def _own_neurons(layout: ExpertLayout, layer: int) -> ExpertLayout:
    """One layer with the neurons that this rank trains, of each expert as many; no others."""
    numbers = (layout.neurons_of_expert(layer).T, layout.shared_neurons(layer))
    own = torch.cat([each.tensor_split(num_ranks())[rank()].flatten() for each in numbers])
    whole_N = layout.expert_of_neuron_LN[layer]
    own_N = torch.full_like(whole_N, DROPPED).index_copy_(0, own, whole_N[own])
    router_ED = layout.router_LED[layer]
    return replace(layout, expert_of_neuron_LN=own_N[None], router_LED=router_ED[None])


@torch.no_grad()
@in_fast_products()
def repair(
    dense: DenseModel,
    layouts: Layouts,
    blocks: TokenBlocks,
    config: RepairConfig,
    *,
    folder: Path,
    on_progress: Update = no_update,
) -> dict[str, Any]:
    """Change FFNs or W_O of each split layer, so that the masked model follows the dense one.

    Two residual streams go through the layers side by side: the dense model's, and that of the
    masked model as repaired so far. In each split FFN or attention, weights change so that the
    second comes as close as it can to the first, token by token relative to its size. In an FFN
    Adam trains all projections, for `repair_epochs`, and four fifths of the change are kept.
    Ridge regression refits the output projection of attention; and of FFNs without epochs, or where
    rows held out do not gain from the training. Every 8th row of text is held out for that and to
    choose the penalty. A stopped process resumes after the finished layers, with the same result.
    Ranks divide the text and call this together. The weights of `dense` are in memory or on disk,
    and unchanged afterwards.

    `folder` receives the new projections in the dtypes of the source (`CHANGES`, to be read by
    `trained_model`), `layout.safetensors` and `repair.json`.

    Returns the contents of `repair.json`: `tokens`, `active_experts`, and for each of `layers`
    (and, with attention, each `target`) the `ridge`, None for no refit, the share `kept` of what
    training changed, and the `heldout_error` of all of it, a share of the masked dense weights'.
    Raises a `UserError` if there is too little text, or ranks are more than neurons of an expert.
    """
    dense.require("memory", "disk")
    raise_on_all_ranks(lambda: _require_parts(layouts[0], config))
    streams, stored = _Streams(dense, layouts, blocks, config), Tensors.of(dense)
    metrics = list[dict[str, Any]]()
    for index, target, problem in streams.problems():
        checkpoint = folder / CHANGES / f"{index:05d}_{target.name}"
        if not broadcast_from_rank_zero(checkpoint.is_dir):
            near = next((m["ridge"] for m in reversed(metrics) if m["ridge"]), None)
            weights, of_layer = _solution(streams, problem(), config.repair_epochs, near)
            if kept := of_layer.get("kept"):
                weights = _on_the_way(dense, weights, kept)
            dtype = stored.describe(target.output_tensor(index))[1]
            tensors = {name: weight.to(dtype) for name, weight in weights.items()}
            written = {"layer": index, **of_layer}
            broadcast_from_rank_zero(partial(_write, checkpoint, tensors, written))
        metrics.append(read_json(checkpoint / METRICS))
        changed, kept = load_file(checkpoint / CHANGED), metrics[-1].get("kept")
        streams.use(_on_the_way(dense, changed, 1 / kept) if kept else changed)
        error = f"error {metrics[-1]['heldout_error']:.3f}"
        on_progress(index + 1, layouts[0].num_layers, error)
    served = [layout.active_experts for layout in layouts]
    record = {"tokens": streams.num_tokens, "active_experts": served, "layers": metrics}

    def finish() -> None:
        save_layouts(layouts, folder)
        write_json(folder / METRICS, record)

    broadcast_from_rank_zero(finish)
    return record


def _on_the_way(dense: DenseModel, to: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """A share of the way from the model's own weights to others of these names."""
    own = {name: dense.model.get_parameter(name).detach().float() for name in to}
    return {name: own[name].lerp(weight.to(own[name]), share) for name, weight in to.items()}


def _require_parts(layout: ExpertLayout, config: RepairConfig) -> None:
    """Refuse to train more parts of an expert than it has neurons."""
    if config.repair_epochs and layout.target == "ffn" and layout.expert_size < num_ranks():
        raise UserError(
            f"experts have {layout.expert_size} neurons, but {num_ranks()} ranks divide each to "
            f"train it. Start at most {layout.expert_size} ranks, or give --repair-epochs 0."
        )


def _write(checkpoint: Path, tensors: dict[str, Tensor], metrics: dict[str, Any]) -> None:
    """Write what one layer got, whole or not at all."""
    with complete_folder(checkpoint) as partial_folder:
        save_tensors(tensors, partial_folder / CHANGED)
        write_json(partial_folder / METRICS, metrics)


def _solution(
    streams: "_Streams", problem: LayerProblem, epochs: int, near: float | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """New weights of one FFN or attention, by their names in the model, and metrics."""
    weights, error, metrics = dict[str, Tensor](), 1.0, dict[str, Any]()
    if problem.target.name == "attention":
        metrics["target"] = "attention"
    elif epochs:
        weights, error = train(problem, epochs)
        if weights:
            return weights, {"ridge": None, "kept": _KEPT, "heldout_error": error}
    output_DN, ridge, error = refit(problem.output, *streams.equations(problem), near)
    return {problem.output_name: output_DN}, metrics | {"ridge": ridge, "heldout_error": error}


class _Streams:
    """The residual streams of a dense model and of its masked model, which pose the problems."""

    def __init__(
        self, dense: DenseModel, layouts: Layouts, blocks: TokenBlocks, config: RepairConfig
    ) -> None:
        self.maskings, self._layouts = maskings_of(dense, *layouts), layouts
        self._model, self._device = dense, dense.device
        self._traits = dense.traits
        self._layers = dense.family.layers(dense.model)
        wanted = repair_tokens(config, splits_in(layouts), dense.config)
        drawn = raise_on_all_ranks(lambda: _drawn(blocks, wanted))
        self.num_tokens = sum(rows_BT.numel() for rows_BT in drawn)
        (fitted_BT, counts_B), (heldout_BT, heldout_counts_B) = map(_own_rows, drawn)
        tokens_BT, self._num_fitted = torch.cat([fitted_BT, heldout_BT]), len(fitted_BT)
        self._counts_B = torch.cat([counts_B, heldout_counts_B])
        """Whether each row of this rank counts: False for those that only fill its share."""
        rows, num = max(1, TOKENS_AT_ONCE // blocks.seq_len), self._num_fitted
        # Rows that run at once are either all fitted or all held out.
        self._parts = [slice(row, min(row + rows, num)) for row in range(0, num, rows)]
        self._parts += [slice(row, row + rows) for row in range(num, len(tokens_BT), rows)]
        self._dense = self._converted = Stream(dense, tokens_BT, self._parts)
        self._attended_BTD = torch.empty(0)
        """The dense stream between attention and FFN of the layer it went through last."""
        self._inputs_BTD = torch.empty(0, 0, dense.widths.model)
        """Inputs of the FFN before which the masked model's stream stands."""
        self._wanted_BTD = self._inputs_BTD
        """What that FFN, with its norm, should give."""
        self._own = dict[nn.Parameter, Tensor]()
        """The model's own weights, by the parameters whose values `use` has replaced."""

    def problems(self) -> Iterator[tuple[int, Target, Callable[[], LayerProblem]]]:
        """Yield layer and target of each split part, and a function that poses its problem.

        They come in the order in which data passes: the masked model's stream goes on with the
        weights given to `use` by then. After the layer the model has its own weights again.
        """
        first, layouts = self.maskings[0].first_layer, self._layouts
        for index in range(len(self._layers)):
            with whole_weights(self._model, index):
                if index == first:
                    self._converted = self._dense.clone()
                if layouts[-1].target == "attention":
                    runs = [self._before_ffn(self._dense, index, part)[0] for part in self._parts]
                    self._attended_BTD = torch.cat([part_BTD.cpu() for part_BTD in runs])
                self._dense.advance(index)
                if index < first:
                    continue
                with masked(self._model, self.maskings, only=[index]):
                    for masking, layout in zip(self.maskings[::-1], layouts[::-1], strict=True):
                        target = TARGETS[layout.target]  # attention is before the FFN
                        if target.name == "ffn":
                            self._advance_to_ffn(index)
                        yield index, target, partial(self._problem, index, target, masking, layout)
                    if layouts[0].target == "ffn":
                        self._advance_through_ffn(index)
                    else:
                        self._converted.advance(index)
                while self._own:
                    parameter, weight = self._own.popitem()
                    parameter.data = weight

    def use(self, weights: Mapping[str, Tensor]) -> None:
        """Give the model the weights that solve the problem posed last."""
        for name, weight in weights.items():
            parameter = self._model.model.get_parameter(name)
            self._own.setdefault(parameter, parameter.data)
            parameter.data = weight.to(parameter)

    def _before_ffn(self, stream: Stream, index: int, part: slice) -> tuple[Tensor, Tensor]:
        """Some rows of a stream after a layer whose FFN gives nothing, and the FFN's inputs."""
        inputs = list[Tensor]()

        def nothing(x: Tensor) -> Tensor:
            inputs.append(x)
            return torch.zeros_like(x)

        block = self._model.family.block(self._layers[index], TARGETS["ffn"])
        with computing({block: nothing}):
            return stream.after(index, part), inputs[0]

    def _advance_to_ffn(self, index: int) -> None:
        """Advance the masked model's stream through a layer but for its FFN, whose inputs stay."""
        self._inputs_BTD = torch.empty_like(self._converted.hidden_BTD)
        self._wanted_BTD = torch.empty_like(self._converted.hidden_BTD)
        for part in self._parts:
            reached_BTD, x_BTD = self._before_ffn(self._converted, index, part)
            self._wanted_BTD[part] = self._missing(self._dense.hidden_BTD[part], reached_BTD).cpu()
            self._converted.hidden_BTD[part] = reached_BTD.cpu()
            self._inputs_BTD[part] = x_BTD.cpu()

    def _missing(self, dense_BTD: Tensor, reached_BTD: Tensor) -> Tensor:
        """What a part of a layer has to add to its output, before the residual multiplier."""
        missing_BTD = dense_BTD.to(self._device).float() - reached_BTD.float()
        return missing_BTD / self._traits.multipliers.residual

    def _advance_through_ffn(self, index: int) -> None:
        """Add what the FFN gives for its inputs to the masked model's stream."""
        family, layer, layout = self._model.family, self._layers[index], self._layouts[0]
        norm = family.norm_after(layer, TARGETS["ffn"])
        routing = Routing(active_experts=layout.active_experts)
        sparse = SparseFFN(family.ffn(layer), layout, index, routing)
        rows = (self._inputs_BTD.flatten(0, 1), self._converted.hidden_BTD.flatten(0, 1))
        parts = (torch.split(each_TD, _SORTED_AT_ONCE) for each_TD in rows)
        for x_TD, hidden_TD in zip(*parts, strict=True):
            output_TD = norm(sparse(x_TD.to(self._device))) * self._traits.multipliers.residual
            hidden_TD += output_TD.cpu()

    def _problem(
        self, index: int, target: Target, masking: Masking, layout: ExpertLayout
    ) -> LayerProblem:
        """The problem of one part of the layer that the dense stream went through last."""
        family, layer = self._model.family, self._layers[index]
        dense_BTD = self._dense.hidden_BTD if target.name == "ffn" else self._attended_BTD
        expert_of_N = masking.expert_of_neuron_LN[index - masking.first_layer]
        return LayerProblem(
            layer=index,
            target=target,
            name=family.own_name(f"model.layers.{index}.{target.module}"),
            output_name=family.own_name(target.output_tensor(index)),
            block=family.block(layer, target),
            ffn=family.ffn(layer),
            layout=layout,
            output=family.output(layer, target),
            norm=family.norm_after(layer, target),
            expert_of_N=target.of_columns(expert_of_N, self._model.config),
            x_TD=self._inputs_BTD.flatten(0, 1),
            wanted_TD=self._wanted_BTD.flatten(0, 1),
            weight_T=self._token_weights(dense_BTD).flatten(),
            num_fitted=self._num_fitted * dense_BTD.shape[1],
        )

    def equations(self, problem: LayerProblem) -> tuple[NormalEquations, NormalEquations]:
        """Sums over the tokens to fit, and over those held out, with the weights of now."""
        norm, output, is_ffn = problem.norm, problem.output, problem.target.name == "ffn"
        sizes, on_cpu = (problem.expert_of_N, output.out_features), self._device.type == "cpu"
        fitted, heldout = (NormalEquations(*sizes, by_expert=on_cpu) for _ in range(2))
        weight_BT = problem.weight_T.view(self._dense.hidden_BTD.shape[:2])
        tapped = list[tuple[Tensor, Tensor]]()
        tap = output.register_forward_hook(
            lambda module, args, output: tapped.append((args[0].float(), output.float()))
        )
        with tap:
            for part in self._parts:
                if is_ffn:
                    output_BTD = norm(problem.block(self._inputs_BTD[part].to(self._device)))
                    missing_BTD = self._wanted_BTD[part].to(output_BTD).float() - output_BTD
                else:
                    reached_BTD, _ = self._before_ffn(self._converted, problem.layer, part)
                    missing_BTD = self._missing(self._attended_BTD[part], reached_BTD)
                missing_TD, weight_T = missing_BTD.flatten(0, 1), weight_BT[part].flatten()
                hidden_TN, product_TD = (each.flatten(0, -2) for each in tapped.pop())
                if self._traits.norms_after:
                    gain_D = self._model.family.gain(norm)
                    missing_TD, scale_T = _before_norm(missing_TD, product_TD, gain_D)
                    weight_T = weight_T / scale_T.square()
                sums = heldout if part.start >= self._num_fitted else fitted
                sums.add(hidden_TN, missing_TD, weight_T)
        fitted.sum_over_ranks()
        heldout.sum_over_ranks()
        return fitted, heldout

    def _token_weights(self, dense_BTD: Tensor) -> Tensor:
        """Token weights [B, T]: 1 / mean square of the stream, over its median and at most 10."""
        parts = [1 / dense_BTD[part].float().square().mean(2) for part in self._parts]
        weight_BT, counts_B1 = torch.cat(parts), self._counts_B[:, None]
        median = torch.cat(gathered(weight_BT.where(counts_B1, torch.nan))).nanmedian()
        return ((weight_BT / median).clamp(max=_LARGEST_WEIGHT) * counts_B1).to(self._device)


def _drawn(blocks: TokenBlocks, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Rows drawn evenly over the text: those to fit, and every 8th, which is held out."""
    if blocks.num_blocks < 2:
        raise UserError(
            f"the text gives 1 block of {blocks.seq_len} tokens, but a repair needs two, one of "
            "them held out to choose its penalty. Give more text, or lower seq_len."
        )
    tokens_BT = blocks.drawn(max(num_tokens, 2 * blocks.seq_len))
    rows = len(tokens_BT)
    is_heldout = torch.arange(rows) % HELD_OUT == min(rows, HELD_OUT) - 1
    return tokens_BT[~is_heldout], tokens_BT[is_heldout]


def _own_rows(rows_BT: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's rows, as many as each rank has, and whether they count: others fill the share."""
    ranks, num = num_ranks(), len(rows_BT)
    number_B = torch.arange(rank(), math.ceil(num / ranks) * ranks, ranks)
    return rows_BT[number_B % num], number_B < num


def _before_norm(missing_TD: Tensor, product_TD: Tensor, gain_D: Tensor) -> tuple[Tensor, Tensor]:
    """What a product lacks before a norm, if its size stays what it is; and that size, [T]."""
    scale_T = product_TD.square().mean(1).sqrt()
    scale_T = scale_T.clamp_min(float(scale_T.median()) / _LARGEST_WEIGHT + 1e-30)
    power_D = gain_D.square()  # damped: a gain near zero asks for next to nothing
    return missing_TD * scale_T[:, None] * gain_D / (power_D + 0.01 * power_D.mean()), scale_T
