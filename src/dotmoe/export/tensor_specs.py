"""The tensors of an export, each described before it is made."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from dotmoe.artifacts import DenseModel
from dotmoe.errors import UserError
from dotmoe.export.architecture import Conversion, TensorSpec
from dotmoe.export.dense_tensors import EMBEDDING, HEAD
from dotmoe.export.router_scale import scaled_router

NORM = "model.norm.weight"

PROJECTIONS = ("gate", "up", "down")


def carried_names(dense: DenseModel, layer: int) -> list[str]:
    """Tensors of one layer outside its FFN, in LLaMA's form; they keep name and content."""
    traits = dense.family.traits(dense.config)
    norms = ("input", "post_attention")
    if traits.norms_after:
        norms = ("post_attention", "post_feedforward")
    names = [f"{name}_layernorm.weight" for name in norms]
    names += [f"self_attn.{part}_proj.weight" for part in "qkvo"]
    if traits.qkv_bias:
        names += [f"self_attn.{part}_proj.bias" for part in "qkv"]
    if traits.output_bias:
        names.append("self_attn.o_proj.bias")
    if traits.qk_norm != "none":
        names += [f"self_attn.{part}_norm.weight" for part in "qk"]
    return [f"model.layers.{layer}.{name}" for name in names]


def carried(conversion: Conversion, name: str) -> TensorSpec:
    """A tensor that keeps its name and content."""
    shape, _ = conversion.tensors.describe(name)
    return TensorSpec(
        name=name,
        shape=shape,
        dtype=conversion.dtype,
        make=lambda: conversion.tensors.read(name).to(conversion.dtype),
    )


def dense_ffn(conversion: Conversion, layer: int) -> Iterator[TensorSpec]:
    """The FFN of a layer that stays dense."""
    for projection in PROJECTIONS:
        yield carried(conversion, conversion.dense.family.ffn_tensor(layer, projection))


def router(conversion: Conversion, layer: int, name: str) -> TensorSpec:
    """Router rows times 2^-p, [E, D]."""
    rows_ED = scaled_router(
        conversion.layout.router_LED[layer],
        conversion.exponents[layer],
        conversion.dtype,
        layer=layer,
    )
    return TensorSpec(
        name=name, shape=tuple(rows_ED.shape), dtype=conversion.dtype, make=lambda: rows_ED
    )


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
    shape, _ = conversion.tensors.describe(source)
    axis = 1 if projection == "down" else 0
    sizes = list(shape)
    sizes[axis] = len(neurons_S) if size is None else size
    make = partial(_slice, conversion, source, axis, neurons_S.cpu(), factor, sizes[axis])
    return TensorSpec(name=name, shape=tuple(sizes), dtype=conversion.dtype, make=make)


def experts(
    conversion: Conversion, layer: int, name_of: Callable[[int, str], str], *, factor: float
) -> Iterator[TensorSpec]:
    """The projections of each expert as tensors of their own; down times `factor`."""
    neurons_ES = conversion.layout.neurons_of_expert(layer).cpu()
    # Projection outside, expert inside: the slices of one dense matrix follow each other.
    for projection in PROJECTIONS:
        for expert, neurons_S in enumerate(neurons_ES):
            yield neurons(
                conversion,
                layer,
                projection,
                neurons_S,
                name_of(expert, projection),
                factor=factor if projection == "down" else 1.0,
            )


def zeros(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
    """Zeros."""
    return constant(name, shape, dtype, 0.0)


def constant(name: str, shape: tuple[int, ...], dtype: torch.dtype, value: float) -> TensorSpec:
    """One value throughout."""
    return TensorSpec(
        name=name, shape=shape, dtype=dtype, make=lambda: torch.full(shape, value, dtype=dtype)
    )


def require_no_strangers(conversion: Conversion, format_name: str) -> None:
    """Refuse a checkpoint with weights that would be left behind.

    Raises:
        UserError: Names the first of them.
    """
    dense, tensors = conversion.dense, conversion.tensors
    known = {EMBEDDING, NORM, HEAD}
    for layer in range(conversion.layout.num_layers):
        known.update(carried_names(dense, layer))
        known.update(dense.family.ffn_tensor(layer, name) for name in PROJECTIONS)
    reached = {tensors.stored_name(name) for name in known} | {EMBEDDING, HEAD}
    strangers = sorted(
        name
        for name in tensors.names - reached
        if not name.endswith("rotary_emb.inv_freq")  # old checkpoints store this constant
    )
    if strangers:
        raise UserError(
            f"{strangers[0]} is stored in {tensors.folder}, but {format_name} has no place "
            f"for it ({len(strangers)} such tensors). Choose a plain checkpoint of its family."
        )


def _slice(
    conversion: Conversion, source: str, axis: int, neurons_S: Tensor, factor: float, size: int
) -> Tensor:
    part = conversion.tensors.read(source).index_select(axis, neurons_S)
    if factor != 1.0:
        part = (part.double() * factor).to(conversion.dtype)
    missing = size - len(neurons_S)
    if missing:
        part = torch.nn.functional.pad(part, (0, missing) if axis else (0, 0, 0, missing))
    return part.to(conversion.dtype)
