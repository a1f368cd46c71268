"""The architecture of our own: experts made of query heads, which no stock one has."""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from dotmoe.checkpoint.tensors import EMBEDDING, HEAD, NORM
from dotmoe.export import tensors as specs
from dotmoe.export.format import (
    STORED,
    Conversion,
    Holds,
    TensorSpec,
    unsupported_size,
)
from dotmoe.export.transformers_format import TransformersFormat
from dotmoe.granularity import Granularity, parts_of, targets_of
from dotmoe.models import modeling_dotmoe
from dotmoe.models.dense import DenseModel
from dotmoe.models.family import TARGETS, head_dim
from dotmoe.parameters import count_parameters

CODE = Path(modeling_dotmoe.__file__)
_LAYER = "model.layers.{}."


class DotMoe(TransformersFormat):
    """The dense model's own decoder with experts of heads, and of neurons if both are split."""

    name = "dotmoe"
    class_name = "DotMoeForCausalLM"
    servers = ("Transformers with dotmoe imported or trust_remote_code=True",)
    holds = Holds(sliding_window=True)  # and all else: the decoder is the dense model's
    active_experts_editable = True
    scales_routers = folds = False

    def refusal(
        self, dense: DenseModel, granularity: Granularity, dtype: torch.dtype
    ) -> str | None:
        if targets_of(granularity) == "ffn":
            return f"{self.name} is for experts made of heads. Set targets to attention or both."
        if granularity.target == "attention":  # whose sizes no stock implementation limits
            return None
        return unsupported_size(self.name, dense, granularity, dtype)

    def exactness(self, conversion: Conversion) -> str:
        return "all weights are those that were split, and gates are 1 (exact)"

    def notes(self, conversion: Conversion) -> list[str]:
        return [
            "Served by Transformers alone: vLLM, SGLang and llama.cpp have no attention of which "
            "some heads run, and cannot load it. `import dotmoe` makes Transformers know it; "
            "without dotmoe, give from_pretrained trust_remote_code=True, which runs "
            f"{CODE.name} of this folder.",
            "All keys and values are computed, so the KV cache is as large as the dense model's.",
        ]

    def header(self, conversion: Conversion) -> dict[str, Any]:
        dense, heads = conversion.dense, conversion.layout.of_target("attention")
        assert heads is not None  # `refusal` says otherwise
        values: dict[str, Any] = dense.config.to_dict()
        for key in ("transformers_version", "_name_or_path", "id2label", "label2id"):
            values.pop(key, None)
        family = values.pop("model_type")
        ffn = conversion.layout.of_target("ffn")
        code = CODE.stem
        return values | {
            "architectures": [self.class_name],
            "model_type": self.name,
            "auto_map": {
                "AutoConfig": f"{code}.DotMoeConfig",
                "AutoModelForCausalLM": f"{code}.{self.class_name}",
            },
            # Phi-3 is Mistral's decoder with its projections fused, which are written apart.
            "dense_model_type": "mistral" if family == "phi3" else family,
            "head_dim": head_dim(dense.config),
            "tie_word_embeddings": False,
            "dtype": str(conversion.dtype).removeprefix("torch."),
            "heads_of_experts": [
                heads.neurons_of_expert(layer).flatten().tolist()
                if layer in heads.moe_layers
                else None
                for layer in range(heads.num_layers)
            ],
            "head_experts": heads.num_experts,
            "ffn_experts": ffn.num_experts if ffn else 0,
            "ffn_expert_size": ffn.expert_size if ffn else 0,
            self.active_experts_key: conversion.layout.active_experts,
            "head_experts_per_tok": heads.active_experts if ffn else 0,
        }

    def details(self, conversion: Conversion) -> dict[str, Any]:
        dense, split = conversion.dense, conversion.granularity
        whole = count_parameters(dense.config, dense.family, split)
        more = replace(split, active_experts=split.active_experts - 1)
        less = count_parameters(dense.config, dense.family, more)
        layers = dense.widths.layers - split.first_dense_layers
        return {
            "splits": [asdict(part) for part in parts_of(split)],
            "parameters_of_an_expert": (whole.active - less.active) // layers,
        }

    def run_active_experts(self, model: nn.Module, layers: range, active_experts: int) -> None:
        has_ffns = cast(Any, model).config.ffn_experts
        cast(Any, model).config.num_experts_per_tok = active_experts
        for layer in layers:
            router = f"model.layers.{layer}." + ("mlp" if has_ffns else "self_attn.q_proj")
            cast(Any, model.get_submodule(f"{router}.router")).active = active_experts

    def tensors(self, conversion: Conversion) -> Iterator[TensorSpec]:
        specs.require_no_others(conversion, self.name)
        dense, layout = conversion.dense, conversion.layout
        yield specs.carried(conversion, EMBEDDING)
        for layer in range(layout.num_layers):
            prefix, is_split = _LAYER.format(layer), layer in layout.moe_layers
            own = ("q_proj.weight", "q_proj.bias", "o_proj.weight") if is_split else ()
            for name in specs.carried_names(dense, layer):
                if not name.endswith(own):
                    yield specs.carried(conversion, name)
            if is_split:
                yield from self._head_tensors(conversion, layer)
            ffn = layout.of_target("ffn")
            if is_split and ffn:
                yield specs.router(conversion, layer, f"{prefix}mlp.router.weight", ffn)
                neurons_ES = ffn.neurons_of_expert(layer)
                made = specs.linears(conversion, layer, neurons_ES, "", 1.0)
                for spec, name in zip(made, ("gate_up_proj", "down_proj"), strict=True):
                    yield replace(spec, name=f"{prefix}mlp.experts.{name}")
            else:
                for projection in specs.PROJECTIONS:
                    yield specs.carried(conversion, dense.family.ffn_tensor(layer, projection))
        yield specs.carried(conversion, NORM)
        yield specs.carried(conversion, HEAD)

    def _head_tensors(self, conversion: Conversion, layer: int) -> Iterator[TensorSpec]:
        """Router, queries and outputs of the experts of a layer's attention."""
        dense, heads = conversion.dense, conversion.layout.of_target("attention")
        assert heads is not None
        traits, tensors = dense.family.traits(dense.config), conversion.tensors
        prefix, experts = f"{_LAYER.format(layer)}self_attn.", heads.num_experts
        yield specs.router(conversion, layer, f"{prefix}q_proj.router.weight", heads)
        numbers_N = heads.neurons_of_expert(layer).flatten()

        def of_experts(name: str, axis: int, shape: tuple[int, ...]) -> TensorSpec:
            """A dense tensor with its heads along one axis, expert after expert: [E, ...]."""

            def make() -> Tensor:
                parts = tensors.read(name).chunk(len(numbers_N), dim=axis)
                ordered = torch.cat([parts[number] for number in numbers_N], dim=axis)
                return torch.stack(ordered.chunk(experts, dim=axis))

            stored = STORED[conversion.dtype_of(name)]
            return TensorSpec(name=name, shape=shape, stored=stored, make=make)

        width, rows = dense.widths.model, TARGETS["attention"].inputs(dense.config) // experts
        for kind in ["weight", *(["bias"] if traits.qkv_bias else [])]:
            name, tail = f"{prefix}q_proj.{kind}", (width,) * (kind == "weight")
            if traits.qk_norm == "full":
                yield specs.carried(conversion, name)
            else:
                yield of_experts(name, 0, (experts, rows, *tail))
        yield of_experts(f"{prefix}o_proj.weight", 1, (experts, width, rows))

    def write(self, conversion: Conversion, folder: Path) -> list[str]:
        shutil.copyfile(CODE, folder / CODE.name)
        return super().write(conversion, folder)

    def routed(self, model: nn.Module, target: str) -> list[tuple[nn.Module, nn.Module]]:
        layers = cast(Any, model).model.layers
        if target == "ffn":
            return [(layer.mlp, layer.mlp) for layer in layers]
        return [(layer.self_attn.q_proj, layer.self_attn.o_proj) for layer in layers]

    def chosen_experts(self, block: nn.Module, x_TD: Tensor) -> Tensor:
        return cast(Tensor, block.get_submodule("router")(x_TD))
