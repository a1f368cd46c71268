"""The stock MoE architectures of Transformers that dense decoders become.

Each says how its block weights experts. With router rows scaled by 2^-p all weights are equal but
for `l 2^-p`, and a constant times the weight is 1; the constant is folded into the down
projections.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dotmoe.export import tensors as specs
from dotmoe.export.format import Conversion, Gating, Holds, TensorSpec
from dotmoe.export.transformers_format import TransformersFormat
from dotmoe.granularity import Granularity
from dotmoe.models.dense import DenseModel

SHARED_GATE = 2.0**-20
"""Entry of the gate of Qwen2-MoE's shared expert: its sigmoid is 1/2. A gate of zero would do in
Transformers, but llama.cpp divides by it."""
EMPTY_SHARED_SIZE = 128
"""Neurons of a shared expert of zeros; servers fail on one without neurons."""


def _softmax_over_chosen_k(
    split: Granularity, *, cast: bool = True, score: Any = "softmax"
) -> Gating:
    return Gating(
        score=score,
        renormalised=True,
        constant=float(split.active_experts),
        cast_to_model_dtype=cast,
        logits_in_model_dtype=True,
    )


class _Glm4Moe(TransformersFormat):
    """GLM4-MoE: gates of 2 sigmoid(l), so that k can be edited after export.

    The 2 is folded into the down projections, which changes exponents alone. As the
    `routed_scaling_factor` of the config it would be dropped by vLLM in float16. The shared expert,
    which the architecture cannot do without, holds the neurons that are always on, and zeros where
    there are none.
    """

    name = "glm4_moe"
    class_name = "Glm4MoeForCausalLM"
    servers = ("Transformers", "vLLM", "SGLang")
    holds = Holds(
        biases=("none", "qkv"), qk_norm=("none", "head"), shared_expert=True, dense_layers=True
    )
    experts_key = "n_routed_experts"
    active_experts_editable = True

    def exactness(self, conversion: Conversion) -> str:
        rounded = f" rounded to {str(conversion.dtype).removeprefix('torch.')}"
        return (
            f"expert weights are the dense ones{rounded if conversion.is_rounded else ''}, down "
            "projections times two (exact); gates 1 but for about 2^-11"
        )

    def gating(self, granularity: Granularity) -> Gating:
        return Gating(score="sigmoid", renormalised=False, constant=2.0)

    def own_notes(self, split: Granularity) -> list[str]:
        if split.shared_size:
            return []
        return [
            "Each layer stores one shared expert of zeros: the architecture demands it, it "
            "contributes nothing."
        ]

    def moe_config(self, dense: DenseModel, split: Granularity) -> dict[str, Any]:
        traits = dense.family.traits(dense.config)
        return {
            "partial_rotary_factor": 1.0,
            "attention_bias": traits.qkv_bias,
            "use_qk_norm": traits.qk_norm == "head",
            "moe_intermediate_size": split.expert_size,
            "n_shared_experts": _shared_experts(split),
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": split.first_dense_layers,
            "num_nextn_predict_layers": 0,
        }

    def header(self, conversion: Conversion) -> dict[str, Any]:
        config = super().header(conversion)
        # Read from rope_parameters by 5.x and from the top level by 4.5x; the default is 0.5.
        config["rope_parameters"]["partial_rotary_factor"] = 1.0
        return config

    def moe_tensors(self, conversion: Conversion, layer: int) -> Iterator[TensorSpec]:
        yield from super().moe_tensors(conversion, layer)
        split, prefix = conversion.granularity, f"model.layers.{layer}.mlp"
        bias = f"{prefix}.gate.e_score_correction_bias"
        yield specs.constant(bias, (split.num_experts,), torch.float32, 0.0)
        size = _shared_experts(split) * split.expert_size
        yield from _shared(conversion, layer, f"{prefix}.shared_experts", size)


def _shared_experts(split: Granularity) -> int:
    """Shared experts of the routed experts' size that hold the neurons always on; at least 1."""
    return max(1, -(-split.shared_size // split.expert_size))


def _shared(
    conversion: Conversion, layer: int, prefix: str, size: int, down_factor: float = 1.0
) -> Iterator[TensorSpec]:
    for projection in specs.PROJECTIONS:
        yield specs.neurons(
            conversion,
            layer,
            projection,
            conversion.layout.shared_neurons(layer),
            f"{prefix}.{projection}_proj.weight",
            factor=down_factor if projection == "down" else 1.0,
            size=size,
        )


class _Mixtral(TransformersFormat):
    """Mixtral, the native twin of LLaMA, Mistral and Phi-3; in every runtime."""

    name = "mixtral"
    class_name = "MixtralForCausalLM"
    servers = ("Transformers", "vLLM", "SGLang", "llama.cpp's converter")
    holds = Holds(sliding_window=True)
    experts_key = "num_local_experts"
    router_name = "block_sparse_moe.gate.weight"

    def gating(self, granularity: Granularity) -> Gating:
        return _softmax_over_chosen_k(granularity, cast=False)

    def expert_tensor(self, expert: int, projection: str) -> str:
        part = {"gate": "w1", "up": "w3", "down": "w2"}[projection]
        return f"block_sparse_moe.experts.{expert}.{part}.weight"

    def moe_config(self, dense: DenseModel, split: Granularity) -> dict[str, Any]:
        return {
            "intermediate_size": split.expert_size,
            "sliding_window": dense.family.traits(dense.config).sliding_window,
            "router_jitter_noise": 0.0,
        }


class _Qwen2Moe(TransformersFormat):
    """Qwen2-MoE, the native twin of Qwen2: softmax over all experts, not renormalised; k is free.

    llama.cpp never renormalises here, whatever the config says.
    """

    name = "qwen2_moe"
    class_name = "Qwen2MoeForCausalLM"
    servers = ("Transformers", "vLLM", "SGLang", "llama.cpp's converter")
    gates = "gates 1 but for about 2^-10"
    holds = Holds(biases=("qkv",), any_head_dim=False, shared_expert=True, dense_layers=True)
    active_experts_editable = True
    block_error = 8e-3

    def gating(self, granularity: Granularity) -> Gating:
        return Gating(
            score="softmax",
            renormalised=False,
            constant=float(granularity.num_experts),
            cast_to_model_dtype=True,
            logits_in_model_dtype=True,
        )

    def own_notes(self, split: Granularity) -> list[str]:
        notes = {
            "Each layer stores a shared expert of zeros, which contributes nothing: llama.cpp "
            "cannot load the architecture without one.": not split.shared_size,
            "llama.cpp cannot load this architecture with dense layers.": split.first_dense_layers,
        }
        return [note for note, applies in notes.items() if applies]

    def moe_config(self, dense: DenseModel, split: Granularity) -> dict[str, Any]:
        return {
            "moe_intermediate_size": split.expert_size,
            "shared_expert_intermediate_size": split.shared_size or EMPTY_SHARED_SIZE,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(split.first_dense_layers)),
            "use_sliding_window": False,
            "qkv_bias": True,
        }

    def moe_tensors(self, conversion: Conversion, layer: int) -> Iterator[TensorSpec]:
        yield from super().moe_tensors(conversion, layer)
        prefix = f"model.layers.{layer}.mlp"
        gate, width = f"{prefix}.shared_expert_gate.weight", conversion.dense.widths.model
        yield specs.constant(gate, (1, width), conversion.dtype, SHARED_GATE)
        size = conversion.layout.shared_size or EMPTY_SHARED_SIZE
        yield from _shared(conversion, layer, f"{prefix}.shared_expert", size, 2.0)


class _Qwen3Moe(TransformersFormat):
    """Qwen3-MoE, the native twin of Qwen3."""

    name = "qwen3_moe"
    class_name = "Qwen3MoeForCausalLM"
    servers = ("Transformers", "vLLM", "SGLang", "llama.cpp's converter")
    holds = Holds(biases=("none", "qkvo"), qk_norm=("head",), dense_layers=True)

    def gating(self, granularity: Granularity) -> Gating:
        return _softmax_over_chosen_k(granularity)

    def moe_config(self, dense: DenseModel, split: Granularity) -> dict[str, Any]:
        return {
            "moe_intermediate_size": split.expert_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(split.first_dense_layers)),
            "use_sliding_window": False,
            "attention_bias": dense.family.traits(dense.config).qkv_bias,
        }


class _GraniteMoe(TransformersFormat):
    """GraniteMoe, the native twin of Granite 3; with a shared expert GraniteMoeShared.

    Experts are chosen by their logits and weighted by a softmax over the chosen. The experts of a
    layer are stored together, in two tensors.
    """

    name = "granitemoe"
    class_name = "GraniteMoeForCausalLM"
    servers = ("Transformers", "vLLM", "SGLang")
    gates = "experts are chosen by exact logits"
    holds = Holds(biases=("none", "qkvo"), multipliers=True, any_head_dim=False, shared_expert=True)
    experts_key = "num_local_experts"
    router_name = "block_sparse_moe.router.layer.weight"
    block_name = "block_sparse_moe"
    block_has_shared = False

    def gating(self, granularity: Granularity) -> Gating:
        return _softmax_over_chosen_k(granularity, score="softmax_of_chosen")

    def header(self, conversion: Conversion) -> dict[str, Any]:
        config = super().header(conversion)
        if conversion.layout.shared_size:
            config["architectures"] = ["GraniteMoeSharedForCausalLM"]
            config["model_type"] = "granitemoeshared"
            config["shared_intermediate_size"] = conversion.layout.shared_size
        return config

    def moe_config(self, dense: DenseModel, split: Granularity) -> dict[str, Any]:
        traits = dense.family.traits(dense.config)
        multipliers = traits.multipliers
        attention = multipliers.attention
        return {
            "intermediate_size": split.expert_size,
            "attention_bias": traits.qkv_bias,
            "embedding_multiplier": multipliers.embedding,
            "residual_multiplier": multipliers.residual,
            "attention_multiplier": traits.head_dim**-0.5 if attention is None else attention,
            "logits_scaling": multipliers.logits_divisor,
        }

    def moe_tensors(self, conversion: Conversion, layer: int) -> Iterator[TensorSpec]:
        prefix = f"model.layers.{layer}"
        yield specs.router(conversion, layer, f"{prefix}.{self.router_name}")
        factor = self.gating(conversion.granularity).constant
        neurons_ES = conversion.layout.neurons_of_expert(layer)
        yield from _linears(conversion, layer, neurons_ES, f"{prefix}.block_sparse_moe", factor)
        shared_S = conversion.layout.shared_neurons(layer)
        if len(shared_S):
            for spec in _linears(conversion, layer, shared_S[None], f"{prefix}.shared_mlp", 1.0):
                yield _only(spec)

    def router(self, block: nn.Module) -> nn.Module:
        return block.get_submodule("router")


def _linears(
    conversion: Conversion, layer: int, neurons_ES: Tensor, prefix: str, factor: float
) -> Iterator[TensorSpec]:
    """Gate and up projections of all experts, [E, 2 S, D], and the down ones, [E, D, S]."""
    gate, up, down = (
        specs.stacked_experts(
            conversion, layer, projection, neurons_ES, factor=factor if projection == "down" else 1
        )
        for projection in specs.PROJECTIONS
    )
    num_experts, size, width = gate.shape
    yield replace(
        gate,
        name=f"{prefix}.input_linear.weight",
        shape=(num_experts, 2 * size, width),
        make=lambda: torch.cat([gate.make(), up.make()], dim=1),
    )
    yield replace(down, name=f"{prefix}.output_linear.weight")


def _only(spec: TensorSpec) -> TensorSpec:
    """The single expert of a tensor of experts."""
    return replace(spec, shape=spec.shape[1:], make=lambda: spec.make()[0])


class _FlexOlmo(TransformersFormat):
    """FlexOlmo, the native twin of OLMo 2; in Transformers and vLLM."""

    name = "flex_olmo"
    class_name = "FlexOlmoForCausalLM"
    servers = ("Transformers", "vLLM", "SGLang")
    holds = Holds(biases=("none", "qkvo"), qk_norm=("full",), norms_after=True, any_head_dim=False)

    def gating(self, granularity: Granularity) -> Gating:
        return _softmax_over_chosen_k(granularity)

    def moe_config(self, dense: DenseModel, split: Granularity) -> dict[str, Any]:
        return {
            "intermediate_size": split.expert_size,
            "norm_topk_prob": True,
            "attention_bias": dense.family.traits(dense.config).qkv_bias,
        }


FORMATS: dict[str, TransformersFormat] = {
    form.name: form
    for form in (_Glm4Moe(), _Mixtral(), _Qwen2Moe(), _Qwen3Moe(), _GraniteMoe(), _FlexOlmo())
}
"""In order of preference: the first that can hold a model is its default."""
