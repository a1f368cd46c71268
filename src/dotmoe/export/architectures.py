"""The stock MoE architectures of Transformers, and which format a model is exported to."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from dotmoe.errors import UserError, nearest
from dotmoe.export import tensors as specs
from dotmoe.export.dotmoe_format import DotMoe
from dotmoe.export.format import Conversion, Format, Gating, Holds, TensorSpec
from dotmoe.export.transformers_format import TransformersFormat
from dotmoe.granularity import Granularity
from dotmoe.models.dense import DenseModel

SHARED_GATE = 2.0**-20
"""Entry of the gate of Qwen2-MoE's shared expert: its sigmoid is 1/2. A gate of zero would do in
Transformers, but llama.cpp divides by it."""
EMPTY_SHARED_SIZE = 128
"""Neurons of a shared expert of zeros; servers fail on one without neurons."""
_EVERYWHERE = ("Transformers", "vLLM", "SGLang", "llama.cpp's converter")


class _Glm4Moe(TransformersFormat):
    """GLM4-MoE: gates of 2 sigmoid(l), so that k can be edited after export.

    As the `routed_scaling_factor` of the config the 2 would be dropped by vLLM in float16. The
    shared expert, which the architecture cannot do without, holds the neurons that are always on.
    """

    name = "glm4_moe"
    class_name = "Glm4MoeForCausalLM"
    servers = ("Transformers", "vLLM", "SGLang")
    holds = Holds(
        biases=("none", "qkv"), qk_norm=("none", "head"), shared_expert=True, dense_layers=True
    )
    experts_key = "n_routed_experts"
    active_experts_editable = True
    folds = False

    def gating(self, granularity: Granularity) -> Gating:
        return Gating(score="sigmoid", renormalised=False, constant=2.0)

    def exactness(self, conversion: Conversion) -> str:
        dtype = "" if conversion.keeps_dtypes else f" as {conversion.dtype}".replace("torch.", "")
        return (
            f"expert weights are those that were split{dtype}, down projections times two (exact); "
            f"{self.gates}"
        )

    def moe_config(self, dense: DenseModel, split: Granularity) -> dict[str, Any]:
        traits = dense.family.traits(dense.config)
        return {
            "partial_rotary_factor": 1.0,
            "attention_bias": traits.qkv_bias,
            "use_qk_norm": traits.qk_norm == "head",
            "moe_intermediate_size": split.expert_size,
            "n_shared_experts": specs.shared_experts(split),
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

    def expert_tensors(
        self, conversion: Conversion, layer: int, prefix: str
    ) -> Iterator[TensorSpec]:
        yield from super().expert_tensors(conversion, layer, prefix)
        split = conversion.granularity
        bias = f"{prefix}.gate.e_score_correction_bias"
        yield specs.constant(bias, (split.num_experts,), torch.float32, 0.0)
        size = specs.shared_experts(split) * split.expert_size
        name = f"{prefix}.shared_experts.{{}}_proj.weight"
        yield from specs.shared(conversion, layer, name, size)


class _Mixtral(TransformersFormat):
    """Mixtral, the native twin of LLaMA, Mistral and Phi-3; in every runtime."""

    name = "mixtral"
    class_name = "MixtralForCausalLM"
    servers = _EVERYWHERE
    holds = Holds(sliding_window=True)
    experts_key = "num_local_experts"
    stored_block = "block_sparse_moe"
    parts = ("w1", "w3", "w2")
    casts_weights = False

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
    servers = _EVERYWHERE
    gates = "gates 1 but for about 2^-10"
    holds = Holds(biases=("qkv",), any_head_dim=False, shared_expert=True, dense_layers=True)
    active_experts_editable = True
    block_error = 8e-3

    def gating(self, granularity: Granularity) -> Gating:
        constant = float(granularity.num_experts)
        return replace(super().gating(granularity), renormalised=False, constant=constant)

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

    def expert_tensors(
        self, conversion: Conversion, layer: int, prefix: str
    ) -> Iterator[TensorSpec]:
        yield from super().expert_tensors(conversion, layer, prefix)
        gate, width = f"{prefix}.shared_expert_gate.weight", conversion.dense.widths.model
        yield specs.constant(gate, (1, width), conversion.dtype, SHARED_GATE)
        size = conversion.layout.shared_size or EMPTY_SHARED_SIZE
        name = f"{prefix}.shared_expert.{{}}_proj.weight"
        yield from specs.shared(conversion, layer, name, size, down_factor=2.0)


class _Qwen3Moe(TransformersFormat):
    """Qwen3-MoE, the native twin of Qwen3."""

    name = "qwen3_moe"
    class_name = "Qwen3MoeForCausalLM"
    servers = _EVERYWHERE
    holds = Holds(biases=("none", "qkvo"), qk_norm=("head",), dense_layers=True)

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
    score = "softmax_of_chosen"
    gates = "experts are chosen by exact logits"
    holds = Holds(biases=("none", "qkvo"), multipliers=True, any_head_dim=False, shared_expert=True)
    experts_key = "num_local_experts"
    block_name = stored_block = "block_sparse_moe"
    router_name = "router"
    router_weight = "layer.weight"
    block_has_shared = False

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

    def expert_tensors(
        self, conversion: Conversion, layer: int, prefix: str
    ) -> Iterator[TensorSpec]:
        factor = self.gating(conversion.granularity).constant
        neurons_ES = conversion.layout.neurons_of_expert(layer)
        yield from specs.linears(conversion, layer, neurons_ES, prefix, factor)
        shared_S = conversion.layout.shared_neurons(layer)
        if len(shared_S):
            prefix = prefix.replace(self.block_name, "shared_mlp")
            yield from map(_only, specs.linears(conversion, layer, shared_S[None], prefix, 1.0))


def _only(spec: TensorSpec) -> TensorSpec:
    return replace(spec, shape=spec.shape[1:], make=lambda: spec.make()[0])


class _FlexOlmo(TransformersFormat):
    """FlexOlmo, the native twin of OLMo 2; in Transformers and vLLM."""

    name = "flex_olmo"
    class_name = "FlexOlmoForCausalLM"
    servers = ("Transformers", "vLLM", "SGLang")
    holds = Holds(biases=("none", "qkvo"), qk_norm=("full",), norms_after=True, any_head_dim=False)

    def moe_config(self, dense: DenseModel, split: Granularity) -> dict[str, Any]:
        return {
            "intermediate_size": split.expert_size,
            "norm_topk_prob": True,
            "attention_bias": dense.family.traits(dense.config).qkv_bias,
        }


FORMATS: dict[str, TransformersFormat] = {
    form.name: form
    for form in (
        _Glm4Moe(),
        _Mixtral(),
        _Qwen2Moe(),
        _Qwen3Moe(),
        _GraniteMoe(),
        _FlexOlmo(),
        DotMoe(),
    )
}
"""In order of preference: the first that can hold a model is its default."""
AUTO = "auto"
GGUF_NAMES = ("gguf", "gguf_glm4moe", "gguf_llama", "gguf_dense")
"""`gguf` is the first of the next two that can hold the model; `gguf_dense` is the dense model."""


def explained() -> str:
    """A line for each format: who runs it, and whether k stays free."""
    kinds = {True: "can be edited", False: "is fixed"}
    return "\n\n".join(
        f"{name}: runs in {', '.join(form.servers)}; k {kinds[form.active_experts_editable]}."
        for name, form in FORMATS.items()
    )


def formats_like(name: str) -> dict[str, Format]:
    """The formats of the container that a name asks for, in order of preference.

    Raises:
        UserError: There is no such format; the nearest name is given. Or gguf is not installed.
    """
    if name == AUTO or name in FORMATS:
        return dict(FORMATS)
    if name in GGUF_NAMES:
        from dotmoe.export import gguf_file, gguf_format  # an extra; the first says so

        assert gguf_file
        return {form.name: form for form in gguf_format.GGUF_FORMATS}
    names = [AUTO, *FORMATS, *GGUF_NAMES]
    raise UserError(
        f"export format is {name!r}, which dotmoe cannot write. "
        f"Formats: {', '.join(names)}.{nearest(name, names)}"
    )


def format_for(dense: DenseModel, split: Granularity, name: str, dtype: torch.dtype) -> Format:
    """The format of that name, or for `auto` the first that can hold the model.

    Raises:
        UserError: None can; or that one cannot, and then those that can are named.
    """
    if not 0 <= split.first_dense_layers < dense.widths.layers:
        raise UserError(
            f"first_dense_layers is {split.first_dense_layers}, but the model has "
            f"{dense.widths.layers} layers, of which at least one must be split. "
            f"Choose 0 to {dense.widths.layers - 1}."
        )
    forms = formats_like(name)
    refusals = {each: form.refusal(dense, split, dtype) for each, form in forms.items()}
    able = [each for each, refusal in refusals.items() if refusal is None and forms[each].splits]
    chosen = name if name in forms else next(iter(able or forms))
    refusal = refusals[chosen]
    if refusal is not None:
        others = f" Formats that can hold it: {', '.join(able)}." if able else ""
        raise UserError(refusal + others)
    return forms[chosen]
