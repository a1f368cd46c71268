"""LLM-Pruner: remove the groups of attention heads and FFN neurons that affect the loss least.

The published block-wise method with first-order importance: a group is one key-value head with its
query heads, or one neuron; its score is the sum of |w dL/dw| over all its weights, for the
next-token loss L of the calibration text. Every layer but the first 1/8 and the last 1/16 loses the
same share of its groups of each kind, the lowest scores first. The other weights do not change. The
published code reads ten samples of 64 tokens and, where query heads share keys, adds the scores of
heads that do not belong together; here all calibration tokens are read and heads belong to the keys
they use. At least one head stays. Layers end up with different widths, which no stock config can
describe, so the checkpoint holds zeros.
"""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from dotmoe.models.dense_model import DenseModel
from dotmoe.rivals.pruning.contract import Pruned, PruneInputs, backward, refusing


class Kind(NamedTuple):
    """The groups of one kind in a layer, all of equal size."""

    groups: int
    members: dict[str, int]
    """Names of the tensors that groups share equally, and along which dimension."""


def llm_pruner(inputs: PruneInputs) -> Pruned:
    """Remove the share of the groups that comes nearest to the budget."""
    dense = inputs.dense
    num_neurons = dense.widths.ffn
    removed_N = removed_parameters(dense, torch.arange(num_neurons))
    idle = (removed_N - inputs.excess).abs().argmin()
    touched = _touched(dense)
    kinds = kinds_of(dense)
    kept = [int(_kept(kind, idle, num_neurons)) for kind in kinds]
    if idle:
        backward(inputs)
        for kind, num_kept in zip(kinds, kept, strict=True):
            for index in touched:
                _remove_lowest(dense, index, kind, kind.groups - num_kept)
    dense.model.requires_grad_(False).zero_grad()
    plan = {"heads": kept[0], "neurons": kept[1], "layers": [touched.start, touched.stop]}
    return Pruned(int(removed_N[idle]), plan)


def _remove_lowest(dense: DenseModel, index: int, kind: Kind, num_removed: int) -> None:
    """Zero the groups of one kind in a layer that affect the loss least, by its gradients."""
    parts = grouped(dense, index, kind)
    scores = [
        (parts[name].double() * slope).abs().flatten(1).sum(1)
        for name, slope in grouped(dense, index, kind, slopes=True).items()
    ]
    order_G = torch.stack(scores).sum(0).argsort(stable=True)
    for part in parts.values():
        part[order_G[:num_removed]] = 0


require_separate_heads = refusing(
    lambda traits: traits.qk_norm == "full",
    "a norm over all heads at once, so llm_pruner cannot remove some of them",
)


def removed_parameters(dense: DenseModel, idle: Int[Tensor, "*M"]) -> Int[Tensor, "*M"]:
    """Number of parameters removed with `idle` of the neurons and as large a share of the heads."""
    of_a_layer = torch.zeros_like(idle)
    for kind in kinds_of(dense):
        size = sum(part.numel() for part in grouped(dense, 0, kind).values()) // kind.groups
        of_a_layer += size * (kind.groups - _kept(kind, idle, dense.widths.ffn))
    return of_a_layer * len(_touched(dense))


def _touched(dense: DenseModel) -> range:
    layers = dense.widths.layers
    return range(layers // 8, layers - layers // 16)


def kinds_of(dense: DenseModel) -> tuple[Kind, Kind]:
    """The two kinds of groups: key-value heads with their query heads, and neurons."""
    rows = [f"self_attn.{name}_proj.{part}" for name in "qkv" for part in ("weight", "bias")]
    heads = dict.fromkeys(rows, 0) | {"self_attn.o_proj.weight": 1}
    ffn = {"mlp.gate_proj.weight": 0, "mlp.up_proj.weight": 0, "mlp.down_proj.weight": 1}
    return Kind(dense.config.num_key_value_heads, heads), Kind(dense.widths.ffn, ffn)


def _kept(kind: Kind, idle: Int[Tensor, "*M"], num_neurons: int) -> Int[Tensor, "*M"]:
    """Groups that stay, to the nearest whole one: a model has few heads, one is a large part."""
    twice = 2 * kind.groups * (num_neurons - idle) + num_neurons
    return (twice // (2 * num_neurons)).clamp_min(1)


def grouped(dense: DenseModel, index: int, kind: Kind, slopes: bool = False) -> dict[str, Tensor]:
    """Each tensor of a layer's groups, or (`slopes`) its gradient, divided by group: [G, ...]."""
    named = dict(dense.model.named_parameters())
    parts = dict[str, Tensor]()
    for name, dimension in kind.members.items():
        place = dense.family.stored(dense.config, f"model.layers.{index}.{name}")
        parameter = named.get(place.stored)
        tensor = parameter.grad if parameter is not None and slopes else parameter
        if tensor is not None:  # a bias may not exist, and has no gradient
            rows = tensor.detach()[slice(*(place.rows or (None,)))].movedim(dimension, 0)
            parts[name] = torch.unflatten(rows, 0, (kind.groups, -1))
    return parts
