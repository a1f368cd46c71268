"""Export to GLM4-MoE: untouched expert slices, and a k that can be edited after export.

The block computes `2.0 * sum over the top k of sigmoid(l_e) * expert_e(x) + shared(x)`. With router
rows scaled by 2^-p the sigmoids are 1/2 within `l 2^-p / 4`, so each gate is 1 within
`l 2^-p / 2`, for every k; the shared expert, which the architecture cannot do without, is zero.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from dotmoe.artifacts import DenseModel
from dotmoe.errors import UserError
from dotmoe.export.architecture import Conversion, TensorSpec
from dotmoe.export.decoder_config import (
    REQUIRED_KEYS,
    decoder_config,
    exported_context,
    rope_refusal,
)
from dotmoe.export.dense_tensors import EMBEDDING, HEAD
from dotmoe.export.router_scale import scaled_router
from dotmoe.granularity import Granularity

NORM = "model.norm.weight"

GROUPED_ALIGNMENT_BYTES = 16
"""Step of strides in torch.nn.functional.grouped_mm, by which Transformers runs experts."""


class Glm4Moe:
    """`Glm4MoeForCausalLM`; in Transformers since 4.54, vLLM and SGLang."""

    name = "glm4_moe"
    experts_key = "n_routed_experts"
    active_experts_key = "num_experts_per_tok"
    active_experts_editable = True
    required_keys: tuple[str, ...] = (
        *REQUIRED_KEYS,
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "n_shared_experts",
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "routed_scaling_factor",
        "first_k_dense_replace",
        "num_nextn_predict_layers",
        "attention_bias",
        "use_qk_norm",
        "partial_rotary_factor",
    )

    def refusal(
        self, dense: DenseModel, granularity: Granularity, dtype: torch.dtype
    ) -> str | None:
        """See `OutputArchitecture.refusal`."""
        if granularity.num_experts < 2:
            return (
                f"The layout has {granularity.num_experts} expert a layer, but the glm4_moe router "
                "needs at least 2. Choose a smaller expert_size."
            )
        multiple = GROUPED_ALIGNMENT_BYTES // dtype.itemsize
        sizes = {"expert_size": granularity.expert_size, "The model width": dense.widths.model}
        for name, size in sizes.items():
            if size % multiple:
                return (
                    f"{name} is {size}, but in {str(dtype).removeprefix('torch.')} the grouped "
                    f"matrix product that runs the experts takes multiples of {multiple} only. "
                    f"Choose such an expert_size, or another model."
                )
        return rope_refusal(dense)

    def notes(self, dense: DenseModel) -> list[str]:
        """See `OutputArchitecture.notes`."""
        notes = [
            "Each layer stores one shared expert of zeros: the architecture demands it, it "
            "contributes nothing.",
            "For inference only: the scaled router passes almost no gradient. Fine-tune before "
            "export.",
        ]
        if exported_context(dense) < dense.widths.context:
            notes.append(
                f"The dense model attends through a sliding window of {exported_context(dense)} "
                "tokens, which glm4_moe has not: max_position_embeddings is lowered from "
                f"{dense.widths.context} to the window, up to which the two are the same."
            )
        return notes

    def config(self, conversion: Conversion) -> dict[str, Any]:
        """See `OutputArchitecture.config`."""
        layout, dense = conversion.layout, conversion.dense
        traits = dense.family.attention(dense.config)
        config = decoder_config(dense, conversion.dtype)
        # Read from rope_parameters by 5.x and from the top level by 4.5x; the default is 0.5.
        config["rope_parameters"]["partial_rotary_factor"] = 1.0
        return {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": self.name,
            **config,
            "partial_rotary_factor": 1.0,
            "attention_bias": traits.qkv_bias,
            "use_qk_norm": traits.qk_norm,
            "n_routed_experts": layout.num_experts,
            "num_experts_per_tok": layout.active_experts,
            "moe_intermediate_size": layout.expert_size,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.0,
            "first_k_dense_replace": 0,
            "num_nextn_predict_layers": 0,
            "output_router_logits": False,
        }

    def tensors(self, conversion: Conversion) -> Iterator[TensorSpec]:
        """See `OutputArchitecture.tensors`."""
        _require_no_strangers(conversion)
        yield _carried(conversion, EMBEDDING)
        for layer in range(conversion.layout.num_layers):
            for name in _carried_names(conversion.dense, layer):
                yield _carried(conversion, name)
            yield from _router(conversion, layer)
            yield from _experts(conversion, layer)
            yield from _shared_expert(conversion, layer)
        yield _carried(conversion, NORM)
        yield _carried(conversion, HEAD)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """See `OutputArchitecture.blocks`."""
        layers = cast(nn.ModuleList, model.get_submodule("model.layers"))
        return [layer.get_submodule("mlp") for layer in layers]

    def chosen_experts(self, block: nn.Module, x_TD: Tensor) -> Tensor:
        """See `OutputArchitecture.chosen_experts`."""
        _, _, chosen_TK = block.get_submodule("gate")(x_TD)
        return cast(Tensor, chosen_TK)

    def set_active_experts(self, model: nn.Module, active_experts: int) -> None:
        """See `OutputArchitecture.set_active_experts`."""
        cast(Any, model).config.num_experts_per_tok = active_experts
        for block in self.blocks(model):
            cast(Any, block).gate.top_k = active_experts


def _carried_names(dense: DenseModel, layer: int) -> list[str]:
    """Tensors of one layer that keep their name and content."""
    traits = dense.family.attention(dense.config)
    names = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    names += [f"self_attn.{part}_proj.weight" for part in "qkvo"]
    if traits.qkv_bias:
        names += [f"self_attn.{part}_proj.bias" for part in "qkv"]
    if traits.qk_norm:
        names += [f"self_attn.{part}_norm.weight" for part in "qk"]
    return [f"model.layers.{layer}.{name}" for name in names]


def _carried(conversion: Conversion, name: str) -> TensorSpec:
    shape, _ = conversion.tensors.describe(name)
    return TensorSpec(
        name=name,
        shape=shape,
        dtype=conversion.dtype,
        make=lambda: conversion.tensors.read(name).to(conversion.dtype),
    )


def _router(conversion: Conversion, layer: int) -> Iterator[TensorSpec]:
    rows_ED = scaled_router(
        conversion.layout.router_LED[layer],
        conversion.exponents[layer],
        conversion.dtype,
        layer=layer,
    )
    prefix = f"model.layers.{layer}.mlp.gate"
    yield TensorSpec(
        name=f"{prefix}.weight",
        shape=tuple(rows_ED.shape),
        dtype=conversion.dtype,
        make=lambda: rows_ED,
    )
    yield _zeros(f"{prefix}.e_score_correction_bias", (len(rows_ED),), torch.float32)


def _experts(conversion: Conversion, layer: int) -> Iterator[TensorSpec]:
    layout = conversion.layout
    neurons_ES = layout.neurons_of_expert(layer).cpu()
    # Projection outside, expert inside: the slices of one dense matrix follow each other.
    for projection in ("gate", "up", "down"):
        name = conversion.dense.family.ffn_tensor(layer, projection)
        shape, _ = conversion.tensors.describe(name)
        axis = 1 if projection == "down" else 0
        size = list(shape)
        size[axis] = layout.expert_size
        for expert in range(layout.num_experts):
            yield TensorSpec(
                name=f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight",
                shape=tuple(size),
                dtype=conversion.dtype,
                make=partial(_slice, conversion, name, axis, neurons_ES[expert]),
            )


def _slice(conversion: Conversion, name: str, axis: int, neurons_S: Tensor) -> Tensor:
    return conversion.tensors.read(name).index_select(axis, neurons_S).to(conversion.dtype)


def _shared_expert(conversion: Conversion, layer: int) -> Iterator[TensorSpec]:
    size, width = conversion.layout.expert_size, conversion.dense.widths.model
    shapes = {"gate": (size, width), "up": (size, width), "down": (width, size)}
    for projection, shape in shapes.items():
        name = f"model.layers.{layer}.mlp.shared_experts.{projection}_proj.weight"
        yield _zeros(name, shape, conversion.dtype)


def _zeros(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
    return TensorSpec(
        name=name, shape=shape, dtype=dtype, make=lambda: torch.zeros(shape, dtype=dtype)
    )


def _require_no_strangers(conversion: Conversion) -> None:
    """Refuse a checkpoint with weights that would be left behind."""
    dense = conversion.dense
    known = {EMBEDDING, NORM, HEAD}
    for layer in range(conversion.layout.num_layers):
        known.update(_carried_names(dense, layer))
        known.update(dense.family.ffn_tensor(layer, name) for name in ("gate", "up", "down"))
    strangers = sorted(
        name
        for name in conversion.tensors.names - known
        if not name.endswith("rotary_emb.inv_freq")  # old checkpoints store this constant
    )
    if strangers:
        raise UserError(
            f"{strangers[0]} is stored in {conversion.tensors.folder}, but glm4_moe has no place "
            f"for it ({len(strangers)} such tensors). Choose a plain checkpoint of its family."
        )
