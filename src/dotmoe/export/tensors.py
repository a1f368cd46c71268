"""The tensors of an export, each described before it is made."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from dotmoe.checkpoint.tensors import EMBEDDING, HEAD, NORM
from dotmoe.errors import UserError
from dotmoe.export.format import STORED, Conversion, TensorSpec
from dotmoe.granularity import Granularity
from dotmoe.layout import ExpertLayout
from dotmoe.models.dense import DenseModel

PROJECTIONS = ("gate", "up", "down")


def carried_names(dense: DenseModel, layer: int) -> list[str]:
    """Tensors of one layer outside its FFN, in LLaMA's form; they keep name and content."""
    traits = dense.family.traits(dense.config)
    after = ("post_attention", "post_feedforward")
    norms = after if traits.norms_after else ("input", "post_attention")
    names = [f"{name}_layernorm.weight" for name in norms]
    names += [f"self_attn.{part}_proj.weight" for part in "qkvo"]
    biased = "qkv" * traits.qkv_bias + "o" * traits.output_bias
    names += [f"self_attn.{part}_proj.bias" for part in biased]
    if traits.qk_norm != "none":
        names += [f"self_attn.{part}_norm.weight" for part in "qk"]
    return [f"model.layers.{layer}.{name}" for name in names]


def carried(conversion: Conversion, name: str) -> TensorSpec:
    """A dense tensor that keeps its name and content."""
    return TensorSpec(
        name=name,
        shape=conversion.tensors.describe(name)[0],
        stored=STORED[conversion.dtype_of(name)],
        make=lambda: conversion.tensors.read(name),
    )


def router(
    conversion: Conversion, layer: int, name: str, part: ExpertLayout | None = None
) -> TensorSpec:
    """Router rows times 2^-p, [E, D]; exact, since the layout's rows are so in the dtype."""
    scale = 2.0 ** -conversion.exponents.get(layer, 0)
    rows_ED = (part or conversion.layout).router_LED[layer].cpu().double() * scale
    stored = STORED[conversion.dtype]
    return TensorSpec(name=name, shape=tuple(rows_ED.shape), stored=stored, make=lambda: rows_ED)


def neurons(
    conversion: Conversion,
    layer: int,
    projection: str,
    neurons_S: Tensor,
    name: str,
    *,
    factor: float = 1.0,
    size: int | None = None,
) -> TensorSpec:
    """The rows (of down: columns) of one projection that belong to some neurons.

    Args:
        conversion: What is exported.
        layer: Number of the layer.
        projection: gate, up or down.
        neurons_S: Their numbers.
        name: Name to write.
        factor: What to multiply by; other than a power of two it rounds once more.
        size: Number of neurons to fill up to, with zeros; None: as many as there are.
    """
    source = conversion.dense.family.ffn_tensor(layer, projection)
    axis = 1 if projection == "down" else 0
    missing = 0 if size is None else size - len(neurons_S)
    shape = list(conversion.tensors.describe(source)[0])
    shape[axis] = len(neurons_S) + missing

    def make() -> Tensor:
        part = conversion.tensors.read(source).index_select(axis, neurons_S.cpu())
        if factor != 1.0:
            part = part.double() * factor
        return pad(part, (0, missing) if axis else (0, 0, 0, missing)) if missing else part

    stored = STORED[conversion.dtype_of(source)]
    return TensorSpec(name=name, shape=tuple(shape), stored=stored, make=make)


def shared_experts(split: Granularity) -> int:
    """Experts, each as wide as a routed one, that hold the neurons that are always on; 1 or more.

    Some architectures demand one.
    """
    return max(1, -(-split.shared_size // split.expert_size))


def shared(
    conversion: Conversion, layer: int, name: str, size: int, *, down_factor: float = 1.0
) -> Iterator[TensorSpec]:
    """The shared expert of a layer, filled up to `size`; `{}` in `name` stands for a projection."""
    for projection in PROJECTIONS:
        yield neurons(
            conversion,
            layer,
            projection,
            conversion.layout.shared_neurons(layer),
            name.format(projection),
            factor=down_factor if projection == "down" else 1.0,
            size=size,
        )


def stacked_experts(
    conversion: Conversion, layer: int, projection: str, neurons_ES: Tensor, *, factor: float = 1.0
) -> TensorSpec:
    """One projection of all experts as one tensor: [E, S, D], or [E, D, S] for down."""
    num_experts, size = neurons_ES.shape
    flat = neurons(conversion, layer, projection, neurons_ES.flatten(), "", factor=factor)
    width = conversion.dense.widths.model

    def make() -> Tensor:
        if projection == "down":
            return flat.make().view(width, num_experts, size).transpose(0, 1)
        return flat.make().view(num_experts, size, width)

    shape = (num_experts, width, size) if projection == "down" else (num_experts, size, width)
    return TensorSpec(name="", shape=shape, stored=flat.stored, make=make)


def linears(
    conversion: Conversion, layer: int, neurons_ES: Tensor, prefix: str, factor: float
) -> Iterator[TensorSpec]:
    """Gate and up projections of all experts, [E, 2 S, D], and the down ones, [E, D, S]."""
    gate, up = (stacked_experts(conversion, layer, each, neurons_ES) for each in ("gate", "up"))
    down = stacked_experts(conversion, layer, "down", neurons_ES, factor=factor)
    num_experts, size, width = gate.shape
    yield replace(
        gate,
        name=f"{prefix}.input_linear.weight",
        shape=(num_experts, 2 * size, width),
        make=lambda: torch.cat([gate.make(), up.make()], dim=1),
    )
    yield replace(down, name=f"{prefix}.output_linear.weight")


def constant(name: str, shape: tuple[int, ...], dtype: torch.dtype, value: float) -> TensorSpec:
    """One value throughout."""
    stored = STORED[dtype]
    return TensorSpec(name=name, shape=shape, stored=stored, make=lambda: torch.full(shape, value))


def require_no_others(conversion: Conversion, format_name: str) -> None:
    """Refuse a checkpoint with weights that would be left behind.

    Raises:
        UserError: Names the first of them.
    """
    dense, tensors = conversion.dense, conversion.tensors
    known = {NORM}
    for layer in range(dense.widths.layers):
        known.update(carried_names(dense, layer))
        known.update(dense.family.ffn_tensor(layer, name) for name in PROJECTIONS)
    reached = {tensors.stored_name(name) for name in known} | {EMBEDDING, HEAD}
    # Old checkpoints store the rotary frequencies, a constant.
    others = sorted(each for each in tensors.names - reached if not each.endswith(".inv_freq"))
    if others:
        raise UserError(
            f"{others[0]} is stored in {tensors.folder}, but {format_name} has no place "
            f"for it ({len(others)} such tensors). Choose a plain checkpoint of its family."
        )
