"""The MoE architectures of Transformers."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from dotmoe.export.format import (
    ConvertedModel,
    Feature,
    Format,
    Gating,
    TensorSpec,
    layer_names,
    shared_experts,
)
from dotmoe.export.parameters import count_parameters
from dotmoe.export.transformers_format import GATES, TransformersFormat, config_of_dense
from dotmoe.method.granularity import Granularity, Splits, targets_of, to_record
from dotmoe.method.layout import ExpertLayout, splits_in
from dotmoe.models import modeling_dotmoe
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hf_config import head_dim

SHARED_GATE = 2.0**-20
"""Entries of the weight of Qwen3.5-MoE's shared-expert gate, so that its sigmoid is 1/2. Zeros
would do in Transformers, but a server may divide by the gate's logit."""
EMPTY_SHARED_SIZE = 128
"""Size of the all-zero shared expert of a model without one; servers fail on an empty one."""
CODE = Path(modeling_dotmoe.__file__)
_EVERYWHERE = ("Transformers", "vLLM", "SGLang", "llama.cpp's converter")


class _Glm4Moe(TransformersFormat):
    """GLM4-MoE: gates are 2 sigmoid(l), so that k can be edited after export.

    The down projections contain the 2, since vLLM drops a `routed_scaling_factor` in float16. The
    architecture requires a shared expert, which holds the neurons that are always on.
    """

    name = "glm4_moe"
    supports = (
        Feature.QKV_BIASES,
        Feature.NORMS_OF_HEADS,
        Feature.OWN_HEAD_DIM,
        Feature.PARTLY_ROTATED,
        Feature.SHARED_EXPERT,
        Feature.DENSE_LAYERS,
    )
    gating = Gating(score="sigmoid")
    experts_key = "n_routed_experts"
    active_experts_editable = True
    constants: ClassVar = {
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
    }

    def exactness(self, converted: ConvertedModel) -> str:
        dtype = "" if converted.keeps_dtypes else f" as {converted.dtype_name}"
        split = f"expert weights are copied{dtype}"
        return f"{split}, down projections times two (exact); {GATES}"

    def config(self, dense: DenseModel, split: Granularity, dtype: str) -> dict[str, Any]:
        config, traits = super().config(dense, split, dtype), dense.traits
        # Transformers 5.x reads it here, 4.5x from the top level; the default is 0.5.
        config["rope_parameters"]["partial_rotary_factor"] = traits.rotated
        return config | {
            "partial_rotary_factor": traits.rotated,
            "use_qk_norm": traits.qk_norm == "head",
            "n_shared_experts": shared_experts(split),
            "first_k_dense_replace": split.first_dense_layers,
        }

    def experts(self, converted: ConvertedModel, layer: int, prefix: str) -> Iterator[TensorSpec]:
        yield from super().experts(converted, layer, prefix)
        layout, bias = converted.layout, f"{prefix}.gate.e_score_correction_bias"
        yield TensorSpec.of(bias, torch.zeros(layout.num_experts), torch.float32)
        size = shared_experts(layout.granularity) * layout.expert_size
        name = f"{prefix}.shared_experts.{{}}_proj.weight"
        yield from converted.projections(layer, layout.shared_neurons(layer), name, size=size)


class _Mixtral(TransformersFormat):
    """Mixtral, the native twin of LLaMA, Mistral and Phi-3; every runtime supports it."""

    name = "mixtral"
    servers = _EVERYWHERE
    supports = (Feature.OWN_HEAD_DIM,)
    supports_window = True
    experts_key = "num_local_experts"
    size_key = "intermediate_size"
    stored_block = "block_sparse_moe"
    projection_names = ("w1", "w3", "w2")
    gating = Gating(casts=False)
    constants: ClassVar = {"router_jitter_noise": 0.0}


class _Qwen3Moe(TransformersFormat):
    """Qwen3-MoE, the native twin of Qwen3."""

    name = "qwen3_moe"
    servers: tuple[str, ...] = _EVERYWHERE
    supports: tuple[Feature, ...] = (Feature.ALL_BIASES, Feature.OWN_HEAD_DIM, Feature.DENSE_LAYERS)
    requires: tuple[Feature, ...] = (Feature.NORMS_OF_HEADS,)
    constants: ClassVar = {
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
    }

    def config(self, dense: DenseModel, split: Granularity, dtype: str) -> dict[str, Any]:
        dense_layers = list(range(split.first_dense_layers))
        return super().config(dense, split, dtype) | {"mlp_only_layers": dense_layers}


class _Qwen35Moe(_Qwen3Moe):
    """The text model of Qwen3.5-MoE, the native twin of Qwen3.5: linear and gated attention."""

    name = "qwen3_5_moe_text"
    twin_of = "qwen3_5_text"
    servers = ("Transformers",)
    supports = (Feature.SHARED_EXPERT,)
    requires = ()
    block_error = 8e-3
    constants: ClassVar = {}

    def config(self, dense: DenseModel, split: Granularity, dtype: str) -> dict[str, Any]:
        size = split.shared_size or EMPTY_SHARED_SIZE
        return super().config(dense, split, dtype) | {"shared_expert_intermediate_size": size}

    def experts(self, converted: ConvertedModel, layer: int, prefix: str) -> Iterator[TensorSpec]:
        yield from super().experts(converted, layer, prefix)
        name, shared_S = f"{prefix}.shared_expert", converted.layout.shared_neurons(layer)
        gate = torch.full((1, converted.dense.widths.model), SHARED_GATE)
        yield TensorSpec.of(f"{name}_gate.weight", gate, converted.dtype)
        size = converted.layout.granularity.shared_size or EMPTY_SHARED_SIZE
        yield from converted.projections(layer, shared_S, f"{name}.{{}}_proj.weight", 2.0, size)


class _GraniteMoe(TransformersFormat):
    """GraniteMoe, the native twin of Granite 3; GraniteMoeShared if there is a shared expert."""

    name = "granitemoe"
    gating = Gating(score="softmax_of_chosen")
    supports = (Feature.ALL_BIASES, Feature.MULTIPLIERS, Feature.SHARED_EXPERT)
    experts_key = "num_local_experts"
    size_key = "intermediate_size"
    block_name = stored_block = "block_sparse_moe"
    router_name = "router"
    router_weight = "layer.weight"
    block_has_shared = False

    def config(self, dense: DenseModel, split: Granularity, dtype: str) -> dict[str, Any]:
        traits, size = dense.traits, split.shared_size
        multipliers, attention = traits.multipliers, traits.multipliers.attention
        config = super().config(dense, split, dtype) | {
            "embedding_multiplier": multipliers.embedding,
            "residual_multiplier": multipliers.residual,
            "attention_multiplier": traits.head_dim**-0.5 if attention is None else attention,
            "logits_scaling": multipliers.logits_divisor,
        }
        shared = {
            "architectures": [CLASSES["granitemoeshared"]],
            "model_type": "granitemoeshared",
            "shared_intermediate_size": size,
        }
        return config | shared if size else config

    def experts(self, converted: ConvertedModel, layer: int, prefix: str) -> Iterator[TensorSpec]:
        layout = converted.layout
        constant = self.gating.constant(layout.active_experts)
        shared = prefix.replace(self.block_name, "shared_mlp")
        for place, neurons, factor in (
            (prefix, layout.neurons_of_expert(layer), constant),
            (shared, layout.shared_neurons(layer), 1.0),
        ):
            if neurons.numel():
                names = (f"{place}.input_linear.weight", f"{place}.output_linear.weight")
                yield from converted.fused_projections(layer, neurons, names, factor)


class _FlexOlmo(TransformersFormat):
    """FlexOlmo, the native twin of OLMo 2; supported by Transformers and vLLM."""

    name = "flex_olmo"
    supports = (Feature.ALL_BIASES,)
    requires = (Feature.NORMS_OVER_HEADS, Feature.NORMS_AFTER)
    size_key = "intermediate_size"
    constants: ClassVar = {"norm_topk_prob": True}


class _DotMoe(TransformersFormat):
    """dotmoe's own: the dense decoder with experts of neurons or heads; exports its code too."""

    name = "dotmoe"
    servers = "Transformers (trust_remote_code=True)", "vLLM (--trust-remote-code --enforce-eager)"
    gating = Gating(score="none")
    active_experts_editable = True

    def runs_in(self, dense: DenseModel) -> tuple[str, ...]:
        kinds = set(getattr(dense.config, "layer_types", None) or ())
        is_plain = kinds <= {"full_attention", "sliding_attention"}  # vLLM refuses other mixers
        return self.servers if is_plain else self.servers[:1]

    def unsupported(self, dense: DenseModel, splits: Splits, dtype: torch.dtype) -> str | None:
        traits = dense.traits
        if traits.rotated != 1 and not traits.has_own_decoder:  # Phi-3 is written as Mistral
            return f"{dense.source} has partly rotated heads, which {self.name} cannot hold."
        if traits.has_own_decoder and targets_of(splits) != "ffn":
            return f"Heads of {dense.config.model_type} cannot be split. Set targets to ffn."
        if splits[0].target == "attention":  # no stock kernel limits the sizes of these experts
            return None
        return self.no_kernel(dense, splits[0], dtype)

    def context(self, dense: DenseModel) -> int:
        return dense.widths.context  # it is the dense model's decoder, with all its windows

    def exactness(self, converted: ConvertedModel) -> str:
        return "all weights are copied, and gates are 1 (exact)"

    def notes(self, converted: ConvertedModel) -> list[str]:
        notes = [
            f"It runs in {' and '.join(self.runs_in(converted.dense))}: SGLang and llama.cpp have "
            f"no such decoder. `import {modeling_dotmoe.__name__}` registers it; without dotmoe, "
            f"trust_remote_code=True runs {CODE.name} from this folder.",
        ]
        if targets_of(splits_in(converted.layouts)) != "ffn":
            notes.append(
                "All keys and values are computed: the KV cache is as large as the dense model's."
            )
        return [*notes, *Format.notes(self, converted)]

    def header(self, converted: ConvertedModel) -> dict[str, Any]:
        dense, layout = converted.dense, converted.layout
        ffn = converted.layout_of("ffn")
        heads = converted.layout_of("attention")
        values = config_of_dense(dense)
        family = values.pop("model_type")
        return values | {
            "architectures": ["DotMoeForCausalLM"],
            "model_type": self.name,
            "auto_map": {
                "AutoConfig": f"{CODE.stem}.DotMoeConfig",
                "AutoModel": f"{CODE.stem}.DotMoeModel",
                "AutoModelForCausalLM": f"{CODE.stem}.DotMoeForCausalLM",
            },
            # Phi-3 is Mistral's decoder with fused projections; exports write them separately.
            "dense_model_type": "mistral" if family == "phi3" else family,
            "ffn_name": dense.family.own_name("mlp"),
            "head_dim": head_dim(dense.config),
            "tie_word_embeddings": False,
            "dtype": converted.dtype_name,
            "first_dense_layers": layout.moe_layers.start,
            "heads_of_experts": _heads_of_experts(heads) if heads else [],
            "head_experts": heads.num_experts if heads else 0,
            "ffn_experts": ffn.num_experts if ffn else 0,
            "ffn_expert_size": ffn.expert_size if ffn else 0,
            "ffn_shared_size": ffn.granularity.shared_size if ffn else 0,
            self.active_experts_key: layout.active_experts,
            "head_experts_per_tok": heads.active_experts if ffn and heads else 0,
        }

    def details(self, converted: ConvertedModel) -> dict[str, Any]:
        dense, splits = converted.dense, splits_in(converted.layouts)
        first, *others = splits
        fewer = replace(first, active_experts=first.active_experts - 1), *others
        at_k = count_parameters(dense.model, dense.family, splits)
        below = count_parameters(dense.model, dense.family, fewer)
        layers = dense.widths.layers - first.first_dense_layers
        return {
            "splits": [to_record((split,)) for split in splits],
            "parameters_of_an_expert": (at_k.active - below.active) // layers,
        }

    def run_active_experts(self, model: nn.Module, layers: range, active_experts: int) -> None:
        cast(Any, model).config.num_experts_per_tok = active_experts
        for layer in layers:  # k is fixed if both are split
            block = cast(Any, model.get_submodule(f"model.layers.{layer}"))
            ffn = getattr(block, cast(Any, model).config.ffn_name)
            router = getattr(ffn, "router", None) or block.self_attn.q_proj.router
            router.active = active_experts

    def dense_tensor(self, converted: ConvertedModel, name: str) -> TensorSpec:
        return converted.spec(name, converted.dense.family.own_name(name))

    def _names(self, dense: DenseModel, layer: int, *, ffn: bool = True) -> list[str]:
        """Names of a layer's tensors in the decoder that is exported; see `layer_names`."""
        names, family = layer_names(dense, layer, ffn=ffn), dense.family
        if dense.config.model_type == "phi3":
            return names
        return list(dict.fromkeys(family.stored(dense.config, name).stored for name in names))

    def layer_tensors(self, converted: ConvertedModel, layer: int) -> Iterator[TensorSpec]:
        dense, layout = converted.dense, converted.layout
        if layer not in layout.moe_layers:
            yield from map(converted.spec, self._names(dense, layer))
            return
        ffn = converted.layout_of("ffn")
        heads = converted.layout_of("attention")
        names = self._names(dense, layer, ffn=ffn is None)
        if heads:
            yield from self._heads(converted, heads, layer, names)
        else:
            yield from map(converted.spec, names)
        if ffn:
            yield from self._experts(converted, ffn, layer)

    def _heads(
        self, converted: ConvertedModel, heads: ExpertLayout, layer: int, names: list[str]
    ) -> Iterator[TensorSpec]:
        """The router of split attention, and the named tensors with projections by expert."""
        attention = f"model.layers.{layer}.self_attn."
        width = head_dim(converted.dense.config)
        columns_NC = torch.arange(heads.granularity.units * width).view(-1, width)
        columns_EC = columns_NC[heads.neurons_of_expert(layer).cpu()].flatten(1)
        axis_of = {"o_proj.weight": 1}
        # If one norm spans all queries, W_Q is computed in full.
        if converted.dense.traits.qk_norm != "full":
            axis_of |= {"q_proj.weight": 0, "q_proj.bias": 0}
        yield converted.router(layer, f"{attention}q_proj.router.weight", heads)
        for name in names:
            axis = axis_of.get(name.removeprefix(attention))
            if axis is None:
                yield converted.spec(name)
            else:
                yield converted.slices(name, axis, columns_EC, name)

    def _experts(
        self, converted: ConvertedModel, ffn: ExpertLayout, layer: int
    ) -> Iterator[TensorSpec]:
        """The router of a split FFN, its experts, and its shared expert if there is one."""
        place = f"model.layers.{layer}.{converted.dense.family.own_name('mlp')}"
        yield converted.router(layer, f"{place}.router.weight", ffn)
        experts, shared = ffn.neurons_of_expert(layer), ffn.shared_neurons(layer)
        for block, neurons in (("experts", experts), ("shared", shared)):
            names = (f"{place}.{block}.gate_up_proj", f"{place}.{block}.down_proj")
            if neurons.numel():
                yield from converted.fused_projections(layer, neurons, names)

    def write(self, converted: ConvertedModel, folder: Path) -> list[str]:
        shutil.copyfile(CODE, folder / CODE.name)
        return super().write(converted, folder)

    def router_and_output(self, model: nn.Module, target: str) -> list[tuple[nn.Module, nn.Module]]:
        if target == "ffn":
            return super().router_and_output(model, target)
        layers = cast(Any, model).model.layers
        return [(layer.self_attn.q_proj, layer.self_attn.o_proj) for layer in layers]

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        name = cast(Any, model).config.ffn_name
        return [layer.get_submodule(name) for layer in cast(Any, model).model.layers]

    def chosen_experts(self, block: nn.Module, x_TD: Tensor) -> Tensor:
        return cast(Tensor, block.get_submodule("router")(x_TD))


def _heads_of_experts(heads: ExpertLayout) -> list[list[int] | None]:
    """Heads of each layer in the order of their experts; None for leading dense layers."""
    dense: list[list[int] | None] = [None for _ in range(heads.moe_layers.start)]
    return dense + [heads.neurons_of_expert(n).flatten().tolist() for n in heads.moe_layers]


_STOCK = (_Glm4Moe, _Mixtral, _Qwen3Moe, _Qwen35Moe, _GraniteMoe, _FlexOlmo)
_MADE = (*(form() for form in _STOCK), _DotMoe())
FORMATS: dict[str, TransformersFormat] = {form.name: form for form in _MADE}
"""Formats in order of preference: the first that can hold a model is its default."""
