"""MoDeGPT: cut each module of a layer by a decomposition that fits it, without gradients.

The published method. All moments are of the dense model. An FFN keeps the neurons of largest ridge
leverage C (C + lambda)^-1 in the moment C of their activations, and W_down is refitted to them
(Nystrom). Queries and keys keep the pairs of jointly rotated features with the largest product of
norms after the rotation (CR), pooled over the queries of a key. Values and outputs of a key-value
head become the best joint map of lower rank, by two SVDs. The share of each module that a layer
loses is proportional to softmax(-s) of its block influence s, but at most 0.8. Here the SVDs use
the moment of the values, bias included; lambda and the ridge of the refit are 1 % of C's mean
diagonal. No stock config can describe widths that differ, so the checkpoint holds zeros.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hf_config import head_dim
from dotmoe.models.hooks import input_hooks
from dotmoe.models.stream import Stream
from dotmoe.rivals.pruning.contract import (
    Pruned,
    PruneInputs,
    compensated,
    damped_inverse,
    refusing,
)
from dotmoe.rivals.pruning.llm_pruner import grouped, kinds_of
from dotmoe.rivals.pruning.whole_layers import block_influence


def modegpt(inputs: PruneInputs) -> Pruned:
    """Cut every layer's modules to the shares that come nearest to the budget."""
    dense = inputs.dense
    weight_L = (-block_influence(inputs)).softmax(0)
    scale_M1 = torch.linspace(0, 1, 10_001)[:, None] / weight_L.min()
    share_ML1 = 0.8 * (scale_M1 * weight_L).clamp_max(1)[..., None]
    unit_3, width_3, step_3 = _modules(dense)
    kept_ML3 = ((1 - share_ML1) * width_3 / step_3).round().clamp_min(1).long() * step_3
    removed_M = ((width_3 - kept_ML3) * unit_3).sum((1, 2))
    best = (removed_M - inputs.excess).abs().argmin()
    plan = kept_ML3[best].tolist()
    removed = int(removed_M[best])
    if removed:
        _cut(inputs, plan)
    return Pruned(removed, {"neurons_features_ranks": plan})


def _cut(inputs: PruneInputs, plan: list[tuple[int, int, int]]) -> None:
    """Cut each layer to its planned numbers of neurons, features of a head, and rank of values."""
    dense = inputs.dense
    stream = Stream(dense, inputs.tokens_BT)
    for index, (neurons, features, rank) in enumerate(plan):
        with _moments(dense, index) as moments:
            stream.advance(index)
        gate, up, down = dense.family.ffn(inputs.layers[index])[:3]
        kept_N = _largest(-damped_inverse(moments["activation"]).diagonal(), neurons)
        gate.weight.mul_(kept_N[:, None])
        up.weight.mul_(kept_N[:, None])
        down.weight.copy_(compensated(down.weight.double(), moments["activation"], kept_N))
        _cut_heads(dense, index, moments, features, rank)
        inputs.on_progress(index + 1, len(plan))


require_plain_heads = refusing(
    lambda traits: traits.qk_norm != "none",
    "norms of queries and keys, so modegpt cannot cut their features",
)


def joint_rank(moment_WW: Tensor, output_RWD: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Maps of a head's values to K features and back that change its R queries' output least."""
    energy_W, axes_WW = torch.linalg.eigh(moment_WW)
    scale_W = energy_W.clamp_min(1e-10 * energy_W[-1].clamp_min(1e-30)).sqrt()
    back_WW = axes_WW * scale_W
    outer_WW = torch.einsum("rvd,rwd->vw", output_RWD, output_RWD)
    first_WK = torch.linalg.eigh(back_WW.T @ outer_WW @ back_WW).eigenvectors[:, -rank:]
    return first_WK.T @ (axes_WW / scale_W).T, back_WW @ first_WK


def _modules(dense: DenseModel) -> Tensor:
    """For FFN, query-key and value-output: parameters per unit of width, the width, its step."""
    size = dense.widths.model
    bias = 1 if dense.traits.qkv_bias else 0
    queries, keys = dense.config.num_attention_heads, dense.config.num_key_value_heads
    width = head_dim(dense.config)
    rotated = (queries + keys) * (size + bias)
    mixed = keys * (size + bias) + queries * size
    return torch.tensor([[3 * size, rotated, mixed], [dense.widths.ffn, width, width], [1, 2, 1]])


@contextmanager
def _moments(dense: DenseModel, index: int) -> Iterator[dict[str, Any]]:
    """Within this context, collect the moments of a layer that its cuts need, in float64."""
    moments: dict[str, Any] = {}
    layer = dense.family.layers(dense.model)[index]
    before = dense.config._attn_implementation

    def add(name: str, values_HTX: Tensor) -> None:
        values_HTX = values_HTX.double()
        moments[name] = moments.get(name, 0) + values_HTX.mT @ values_HTX

    def attend(module: Any, *arguments: Any, **rest: Any) -> Any:
        for name, each_BHTW in zip(("query", "key", "value"), arguments, strict=False):
            add(name, each_BHTW.transpose(0, 1).flatten(1, 2))
        return sdpa_attention_forward(module, *arguments, **rest)

    AttentionInterface.register("moments", attend)
    down = {index: dense.family.ffn(layer).down}
    dense.config._attn_implementation = "moments"
    try:
        with input_hooks(down, lambda _, hidden: add("activation", hidden.flatten(0, -2))):
            yield moments
    finally:
        dense.config._attn_implementation = before


def _cut_heads(
    dense: DenseModel, index: int, moments: dict[str, Tensor], features: int, rank: int
) -> None:
    """Cut queries, keys and values of each key-value head, and the output projection."""
    kind = kinds_of(dense)[0]
    width = head_dim(dense.config)
    size = dense.widths.model
    query, key = (moments[name].diagonal(dim1=1, dim2=2) for name in ("query", "key"))
    score_GW = (query.view(kind.groups, -1, width).sum(1) * key).sqrt()
    parts = grouped(dense, index, kind)
    for group in range(kind.groups):
        kept_W = _largest(score_GW[group].view(2, -1).sum(0), features // 2).repeat(2)
        output_RWD = parts["self_attn.o_proj.weight"][group].double().view(-1, width, size)
        there_KW, back_WK = joint_rank(moments["value"][group], output_RWD, rank)
        for name, part in parts.items():
            own = part[group].view(-1, width, *part.shape[2:])  # [heads, W, D], a bias [heads, W]
            which = name.removeprefix("self_attn.")[0]
            if which in "qk":
                own[:, ~kept_W] = 0
            elif rank < width:
                cut_KW = there_KW if which == "v" else back_WK.T
                cut = torch.einsum("kw,rw...->rk...", cut_KW, own.double())
                own[:, :rank], own[:, rank:] = cut.to(own), 0


def _largest(score_N: Float[Tensor, " N"], num_kept: int) -> Bool[Tensor, " N"]:
    kept_N = torch.zeros_like(score_N, dtype=torch.bool)
    kept_N[score_N.argsort(descending=True, stable=True)[:num_kept]] = True
    return kept_N
