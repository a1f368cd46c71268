"""Repair by layers: refit W_down and W_O under the masks in closed form, then train the FFNs."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor, nn

from dotmoe.common.distributed import in_fast_products, in_float32
from dotmoe.common.errors import UserError
from dotmoe.common.files import complete_folder, read_json, save_tensors, write_json
from dotmoe.common.progress import Update, no_update
from dotmoe.method.config import RepairConfig
from dotmoe.method.granularity import Splits
from dotmoe.method.layout import ExpertLayout, Layouts, save_layouts, splits_in
from dotmoe.method.masked import masked, maskings_of
from dotmoe.method.router import Routing
from dotmoe.method.sparse import SparseFFN
from dotmoe.models.checkpoint import CHANGED, Tensors
from dotmoe.models.family import TARGETS, TOKENS_AT_ONCE, DenseModel, GatedFFN, Stream, Target
from dotmoe.models.hooks import input_hooks
from dotmoe.models.load import CHANGES, whole_weights
from dotmoe.text.blocks import TokenBlocks
from dotmoe.training.loop import cosine_with_warmup

METRICS = "repair.json"
"""Metrics: the stage's, and each layer's beside its weights."""
RIDGES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0)
"""Penalties to try, as shares of the mean diagonal of the Gram matrix."""
SOLUTIONS = 4
"""Solutions that a layer usually takes: three near the last layer's penalty, and the final one."""
_TOKENS_AN_INPUT, HELD_OUT, _LARGEST_WEIGHT = 40, 8, 10.0
BATCH, _MANY_TOKENS, _RATE, _WARMUP = 512, 50_000, 0.02, 0.1
"""Training: tokens per step (half of it on a text of fewer tokens than `_MANY_TOKENS`), peak
learning rate as a share of a matrix's root mean square, and share of the steps that warm up."""


def repair_tokens(config: RepairConfig, splits: Splits, dense_config: Any) -> int:
    """Number of tokens: `repair_tokens`, or the default for the projections of these splits."""
    inputs = [TARGETS[split.target].inputs(dense_config) for split in splits]
    return config.repair_tokens or _TOKENS_AN_INPUT * max(inputs)


class NormalEquations:
    """Weighted sums over tokens for dW = argmin sum_t w_t ||z_t dW - r_t||^2, in float64."""

    def __init__(self, num_neurons: int, width: int, device: torch.device) -> None:
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.gram_NN = zeros(num_neurons, num_neurons)
        self.cross_ND = zeros(num_neurons, width)
        self.missing = zeros(())

    @in_float32()
    def add(self, hidden_TN: Tensor, missing_TD: Tensor, weight_T: Tensor) -> None:
        """Add tokens: masked activations z, what the output lacks (r), and weights w; float32."""
        weighted_TN = hidden_TN * weight_T[:, None]
        self.gram_NN += weighted_TN.T @ hidden_TN
        self.cross_ND += weighted_TN.T @ missing_TD
        self.missing += (missing_TD.square().sum(1) * weight_T).sum()

    def solved(self, ridge: float) -> Float[Tensor, "N D"]:
        """The solution with a penalty on its square: `ridge` (above 0) times the mean diagonal."""
        penalised_NN = self.gram_NN.clone()
        penalised_NN.diagonal().add_(ridge * self.gram_NN.diagonal().mean())
        factor_NN, failed = torch.linalg.cholesky_ex(penalised_NN)
        if failed:  # nothing ran, or nothing is finite: there is nothing to fit
            return torch.zeros_like(self.cross_ND)
        return torch.cholesky_solve(self.cross_ND, factor_NN)

    def error(self, change_ND: Tensor) -> float:
        """Weighted square error with dW, as a share of that with 0: below 1 is a gain."""
        change = ((self.gram_NN @ change_ND - 2 * self.cross_ND) * change_ND).sum()
        return float(1 + change / self.missing) if self.missing else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProblem:
    """One FFN or attention under its masks, and what its output lacks to follow the dense model.

    `fitted` and `heldout` are the sums over tokens that a refit needs. Training needs the tokens
    themselves, the first `num_fitted` to fit; they are not kept where nothing is trained.
    """

    layer: int
    block: nn.Module
    """The FFN or attention; it runs masked."""
    ffn: GatedFFN
    """The layer's FFN with its projections apart."""
    layout: ExpertLayout
    output: nn.Linear
    """The block's output projection."""
    norm: nn.Module
    """The norm (or identity) between the block and the stream, before a residual multiplier."""
    fitted: NormalEquations
    heldout: NormalEquations
    x_TD: Tensor
    """Inputs of the block, on the CPU."""
    wanted_TD: Tensor
    """What the block, with its norm, should give, on the CPU."""
    weight_T: Tensor
    num_fitted: int


def refit(
    problem: LayerProblem, *, whole: bool, near: float | None = None
) -> tuple[Tensor, dict[str, Any]]:
    """The output projection, [D, N], with the penalty best for held-out tokens, and its metrics.

    It is fitted to all tokens if `whole`, else to those not held out; it stays as it is if no
    penalty gains. Without `near` all of `RIDGES` are tried; else the search begins there and goes
    on while a neighbour is better, because each costs a factorisation of the Gram matrix. Metrics:
    `ridge`, None for no change, and `heldout_error` as of `NormalEquations.error`.
    """
    fitted, heldout, before_DN = problem.fitted, problem.heldout, problem.output.weight.double()
    errors, best = dict[int, float](), 0 if near is None else RIDGES.index(near)
    change_ND, left = fitted.cross_ND, [best, best + 1, best - 1] if near else [*range(len(RIDGES))]
    while left:
        index = left.pop(0)
        if index in errors or index not in range(len(RIDGES)):
            continue
        tried_ND = fitted.solved(RIDGES[index])
        errors[index] = heldout.error(tried_ND)
        if index == best or errors[index] < errors[best]:
            best, change_ND = index, tried_ND
            left += [index + 1, index - 1]
    error = errors[best]
    if not error < 1:
        return before_DN, {"ridge": None, "heldout_error": 1.0}
    if whole:
        fitted.gram_NN += heldout.gram_NN
        fitted.cross_ND += heldout.cross_ND
        change_ND = fitted.solved(RIDGES[best])
    return before_DN + change_ND.T, {"ridge": RIDGES[best], "heldout_error": error}


def train(problem: LayerProblem, output_DN: Tensor, epochs: int) -> tuple[dict[str, Tensor], float]:
    """An FFN's weights, trained if held-out tokens gain, and the share of error left on them.

    Adam starts from `output_DN` and takes `epochs` passes over the tokens to fit.
    """
    x_TD, wanted_TD, num = problem.x_TD, problem.wanted_TD, problem.num_fitted
    device = problem.weight_T.device

    def error(ffn: Callable[[Tensor], Tensor], rows_T: Tensor) -> Tensor:
        output_TD: Tensor = problem.norm(ffn(x_TD[rows_T].to(device).float()))
        square_T = (output_TD - wanted_TD[rows_T].to(output_TD)).square().sum(1)
        return (square_T * problem.weight_T[rows_T.to(device)]).sum()

    def heldout_error(ffn: Callable[[Tensor], Tensor]) -> float:
        parts = torch.split(torch.arange(num, len(x_TD)), TOKENS_AT_ONCE)
        return sum(float(error(ffn, rows_T)) for rows_T in parts)

    own = dict(problem.block.named_parameters())
    new = {id(weight): weight.detach().to(torch.float32, copy=True) for weight in own.values()}
    ffn = copy.deepcopy(problem.ffn, new)  # with these copies of its weights
    routing = Routing(active_experts=problem.layout.active_experts)
    make_sparse = partial(SparseFFN, ffn, problem.layout, problem.layer, routing)
    of_dense = heldout_error(make_sparse())
    ffn.down.weight.copy_(output_DN)
    sparse = make_sparse()
    sparse.router.requires_grad_(False)
    of_refit = heldout_error(sparse)
    groups, rows = list[dict[str, Any]](), [ffn.gate.weight, ffn.up.weight, ffn.down.weight.T]
    for (_, *parts), rows_ND in zip(sparse.weights(), rows, strict=True):
        rate = _RATE * float(rows_ND.square().mean().sqrt())
        groups.append({"params": [part for part in parts if part is not None], "lr": rate})
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99), fused=True)
    batch = BATCH if num >= _MANY_TOKENS else BATCH // 2  # else steps are too few
    steps = epochs * (a_pass := math.ceil(num / batch))
    warmed = partial(cosine_with_warmup, total_steps=steps, warmup_steps=round(_WARMUP * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmed)
    generator = torch.Generator().manual_seed(problem.layer)
    for step in range(steps):
        if step % a_pass == 0:
            batches = torch.split(torch.randperm(num, generator=generator), batch)
        with torch.enable_grad():
            loss = error(sparse, batches[step % a_pass]) / batch
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    if (of_trained := heldout_error(sparse)) < of_refit:
        for (_, experts, shared), rows_ND in zip(sparse.weights(), rows, strict=True):
            rows_ND[sparse.neurons_ES] = experts
            if shared is not None:
                rows_ND[sparse.shared_M] = shared
    weights = {name: new[id(weight)] for name, weight in own.items()}
    return weights, min(of_refit, of_trained) / (of_dense or 1.0)


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
    """Refit W_down or W_O of each split layer, so that the masked model follows the dense one.

    Two residual streams go through the layers side by side: the dense model's, and that of the
    masked model as repaired so far. After each split FFN or attention, ridge regression changes its
    output projection so that the second comes as close as it can to the first, token by token
    relative to its size. Every 8th row of text is held out to choose the penalty. With
    `repair_epochs`, Adam then trains all projections of an FFN to the same end on the other rows; a
    layer that gains nothing on held-out rows keeps its refit. A stopped process resumes after the
    finished layers, with the same result. The weights of `dense` are in memory or on
    disk, and unchanged afterwards.

    `folder` receives the new projections in the dtypes of the source (`CHANGES`, to be read by
    `trained_model`), `layout.safetensors` and `repair.json`.

    Returns the contents of `repair.json`: `tokens`, `active_experts`, and for each of `layers`
    (and, with attention, each `target`) the metrics of `refit`, and for a trained FFN the
    `trained_error`: its held-out error relative to that of the dense weights. Raises a `UserError`
    if there is too little text.
    """
    dense.require("memory", "disk")
    streams, stored = _Streams(dense, layouts, blocks, config), Tensors.of(dense)
    metrics = list[dict[str, Any]]()
    for index, target, problem in streams.problems():
        checkpoint = folder / CHANGES / f"{index:05d}_{target.name}"
        if not checkpoint.is_dir():
            near = next((m["ridge"] for m in reversed(metrics) if m["ridge"]), None)
            weights, of_layer = _solution(problem(), target, config.repair_epochs, near)
            dtype = stored.describe(target.output_tensor(index))[1]
            own, block = dense.family.own_name, f"model.layers.{index}.{target.module}"
            tensors = {own(f"{block}.{name}"): part.to(dtype) for name, part in weights.items()}
            with complete_folder(checkpoint) as partial_folder:
                save_tensors(tensors, partial_folder / CHANGED)
                write_json(partial_folder / METRICS, {"layer": index, **of_layer})
        metrics.append(read_json(checkpoint / METRICS))
        streams.use(load_file(checkpoint / CHANGED))
        error = f"error {metrics[-1]['heldout_error']:.3f}"
        on_progress(index + 1, layouts[0].num_layers, error)
    save_layouts(layouts, folder)
    served = [layout.active_experts for layout in layouts]
    record = {"tokens": streams.num_tokens, "active_experts": served, "layers": metrics}
    write_json(folder / METRICS, record)
    return record


def _solution(
    problem: LayerProblem, target: Target, epochs: int, near: float | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """New weights of one FFN or attention, by their names in it, and metrics."""
    is_trained = target.name == "ffn" and epochs > 0
    output_DN, metrics = refit(problem, whole=not is_trained, near=near)
    weights = {f"{target.output_name}.weight": output_DN}
    if is_trained:
        weights, metrics["trained_error"] = train(problem, output_DN, epochs)
    if target.name == "attention":
        metrics = {"target": target.name, **metrics}
    return weights, metrics


class _Streams:
    """The residual streams of a dense model and of its masked model, which pose the problems."""

    def __init__(
        self, dense: DenseModel, layouts: Layouts, blocks: TokenBlocks, config: RepairConfig
    ) -> None:
        self.maskings, self._layouts = maskings_of(dense, *layouts), layouts
        self._model, self._config, self._device = dense, config, dense.device
        self._traits = dense.traits
        self._layers = dense.family.layers(dense.model)
        wanted = repair_tokens(config, splits_in(layouts), dense.config)
        tokens_BT, self._num_fitted = _drawn(blocks, wanted)
        rows, num = max(1, TOKENS_AT_ONCE // blocks.seq_len), self._num_fitted
        # Rows that run at once are either all fitted or all held out.
        self._parts = [slice(row, min(row + rows, num)) for row in range(0, num, rows)]
        self._parts += [slice(row, row + rows) for row in range(num, len(tokens_BT), rows)]
        self.num_tokens = tokens_BT.numel()
        self._dense = self._converted = Stream(dense, tokens_BT, self._parts)
        self._attended_BTD = torch.empty(0)
        """The dense stream between attention and FFN of the layer it went through last."""
        self._own = dict[nn.Parameter, Tensor]()
        """The model's own weights, by the parameters whose values `use` has replaced."""

    def problems(self) -> Iterator[tuple[int, Target, Callable[[], LayerProblem]]]:
        """Yield layer and target of each split part, and a function that poses its problem.

        They come in the order in which data passes: the masked model's stream goes on with the
        weights given to `use` by then. After the layer the model has its own weights again.
        """
        first = self.maskings[0].first_layer
        for index in range(len(self._layers)):
            with whole_weights(self._model, index):
                if index == first:
                    self._converted = self._dense.clone()
                self._advance_dense(index)
                if index < first:
                    continue
                with masked(self._model, self.maskings, only=[index]):
                    for layout in reversed(self._layouts):  # attention is before the FFN
                        target = TARGETS[layout.target]
                        yield index, target, partial(self._problem, index, target, layout)
                    self._converted.advance(index)
                while self._own:
                    parameter, weight = self._own.popitem()
                    parameter.data = weight

    def use(self, weights: Mapping[str, Tensor]) -> None:
        """Give the model the weights that solve the problem posed last."""
        for name, weight in weights.items():
            parameter = self._model.model.get_parameter(name)
            self._own[parameter] = parameter.data
            parameter.data = weight.to(parameter)

    def _advance_dense(self, index: int) -> None:
        """Advance the dense stream through a layer; the masked model's stays before it."""
        attended: list[Tensor] = []
        splits_attention = self.maskings[-1].target == "attention"
        places = {0: self._after_attention(index)} if splits_attention else {}
        with input_hooks(places, lambda _, x: attended.append(x.cpu())):
            self._dense.advance(index)
        if attended:
            self._attended_BTD = torch.cat(attended)

    def _problem(self, index: int, target: Target, layout: ExpertLayout) -> LayerProblem:
        """The problem of one part of the layer that the dense stream went through last."""
        family, layer, is_ffn = self._model.family, self._layers[index], target.name == "ffn"
        norm, output = family.norm_after(layer, target), family.output(layer, target)
        block = family.block(layer, target)
        dense_BTD = self._dense.hidden_BTD if is_ffn else self._attended_BTD
        weight_BT = self._token_weights(dense_BTD)
        sizes = output.in_features, output.out_features, self._device
        sums = NormalEquations(*sizes), NormalEquations(*sizes)
        inputs, wanted = list[Tensor](), list[Tensor]()
        seen, tapped = dict[int, Tensor](), list[tuple[Tensor, Tensor]]()
        tap = output.register_forward_hook(
            lambda module, args, output: tapped.append((args[0].float(), output.float()))
        )
        places = {0: block} | ({} if is_ffn else {1: self._after_attention(index)})
        with tap, input_hooks(places, seen.__setitem__):
            for part in self._parts:
                behind_BTD = self._converted.after(index, part)
                reached_BTD = behind_BTD if is_ffn else seen[1]
                missing_BTD = dense_BTD[part].to(self._device).float() - reached_BTD.float()
                missing_TD = missing_BTD.flatten(0, 1) / self._traits.multipliers.residual
                hidden_TN, product_TD = (each.flatten(0, -2) for each in tapped.pop())
                weight_T = weight_BT[part].flatten()
                if is_ffn and self._config.repair_epochs:
                    inputs.append(seen[0].flatten(0, 1).cpu())
                    wanted_TD = missing_TD + norm(product_TD)
                    wanted.append(wanted_TD.to(self._dense.hidden_BTD))
                if self._traits.norms_after:
                    gain_D = family.gain(norm)
                    missing_TD, scale_T = _before_norm(missing_TD, product_TD, gain_D)
                    weight_T = weight_T / scale_T.square()
                sums[part.start >= self._num_fitted].add(hidden_TN, missing_TD, weight_T)
        return LayerProblem(
            layer=index,
            block=block,
            ffn=family.ffn(layer),
            layout=layout,
            output=output,
            norm=norm,
            fitted=sums[0],
            heldout=sums[1],
            x_TD=torch.cat(inputs or [torch.empty(0)]),
            wanted_TD=torch.cat(wanted or [torch.empty(0)]),
            weight_T=weight_BT.flatten(),
            num_fitted=self._num_fitted * dense_BTD.shape[1],
        )

    def _after_attention(self, index: int) -> nn.Module:
        """The module that is called with the stream between attention and FFN."""
        name = "mlp" if self._traits.norms_after else "post_attention_layernorm"
        return self._layers[index].get_submodule(self._model.family.own_name(name))

    def _token_weights(self, dense_BTD: Tensor) -> Tensor:
        """Token weights [B, T]: 1 / mean square of the stream, over its median and at most 10."""
        parts = [1 / dense_BTD[part].float().square().mean(2) for part in self._parts]
        weight_BT = torch.cat(parts)
        return (weight_BT / weight_BT.median()).clamp(max=_LARGEST_WEIGHT).to(self._device)


def _drawn(blocks: TokenBlocks, num_tokens: int) -> tuple[Tensor, int]:
    """Rows drawn evenly over the text, every 8th (held out) put last; and how many are fitted."""
    if blocks.num_blocks < 2:
        raise UserError(
            f"the text gives 1 block of {blocks.seq_len} tokens, but a repair needs two, one of "
            "them held out to choose its penalty. Give more text, or lower seq_len."
        )
    tokens_BT = blocks.drawn(max(num_tokens, 2 * blocks.seq_len))
    rows = len(tokens_BT)
    is_heldout = torch.arange(rows) % HELD_OUT == min(rows, HELD_OUT) - 1
    return torch.cat([tokens_BT[~is_heldout], tokens_BT[is_heldout]]), int((~is_heldout).sum())


def _before_norm(missing_TD: Tensor, product_TD: Tensor, gain_D: Tensor) -> tuple[Tensor, Tensor]:
    """What a product lacks before a norm, if its size stays what it is; and that size, [T]."""
    scale_T = product_TD.square().mean(1).sqrt()
    scale_T = scale_T.clamp_min(float(scale_T.median()) / _LARGEST_WEIGHT + 1e-30)
    power_D = gain_D.square()  # damped: a gain near zero asks for next to nothing
    return missing_TD * scale_T[:, None] * gain_D / (power_D + 0.01 * power_D.mean()), scale_T
