"""Export to GraniteMoe, the native twin of Granite 3; with a shared expert to GraniteMoeShared.

The k experts are chosen by their logits, and a softmax over the chosen weights them: each weight is
1/k within `l 2^-p / k`, and k is folded into the down projections. The experts of a layer are
stored together, in two tensors.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dotmoe.export import tensor_specs as specs
from dotmoe.export.architecture import Conversion, TensorSpec
from dotmoe.export.gating import Gating
from dotmoe.export.holds import Holds
from dotmoe.export.stock_moe import StockMoe
from dotmoe.granularity import Granularity

MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)


class GraniteMoe(StockMoe):
    """`GraniteMoeForCausalLM` or `GraniteMoeSharedForCausalLM`."""

    name = "granitemoe"
    class_name = "GraniteMoeForCausalLM"
    servers = ("Transformers", "vLLM", "SGLang")
    exactness = (
        "expert weights rounded once, down projections times k; experts are chosen by exact logits"
    )
    holds = Holds(biases=("none", "qkvo"), multipliers=True, any_head_dim=False, shared_expert=True)
    experts_key = "num_local_experts"
    router_name = "block_sparse_moe.router.layer.weight"
    block_name = "block_sparse_moe"
    block_has_shared = False
    moe_keys = ("intermediate_size", "attention_bias", *MULTIPLIERS)

    def gating(self, granularity: Granularity) -> Gating:
        """See `OutputArchitecture.gating`."""
        return Gating(
            score="softmax_of_chosen",
            renormalised=True,
            constant=float(granularity.active_experts),
            cast_to_model_dtype=True,
            logits_in_model_dtype=True,
        )

    def config(self, conversion: Conversion) -> dict[str, Any]:
        """See `OutputArchitecture.config`."""
        config = super().config(conversion)
        if conversion.layout.shared_size:
            config["architectures"] = ["GraniteMoeSharedForCausalLM"]
            config["model_type"] = "granitemoeshared"
            config["shared_intermediate_size"] = conversion.layout.shared_size
        return config

    def moe_config(self, conversion: Conversion) -> dict[str, Any]:
        """See `StockMoe.moe_config`."""
        traits = conversion.dense.family.traits(conversion.dense.config)
        multipliers = traits.multipliers
        attention = multipliers.attention
        return {
            "intermediate_size": conversion.layout.expert_size,
            "attention_bias": traits.qkv_bias,
            "embedding_multiplier": multipliers.embedding,
            "residual_multiplier": multipliers.residual,
            "attention_multiplier": traits.head_dim**-0.5 if attention is None else attention,
            "logits_scaling": multipliers.logits_divisor,
        }

    def moe_tensors(self, conversion: Conversion, layer: int) -> Iterator[TensorSpec]:
        """See `StockMoe.moe_tensors`."""
        prefix = f"model.layers.{layer}"
        yield specs.router(conversion, layer, f"{prefix}.{self.router_name}")
        factor = self.down_factor(conversion.granularity)
        neurons_ES = conversion.layout.neurons_of_expert(layer)
        yield from _linears(conversion, layer, neurons_ES, f"{prefix}.block_sparse_moe", factor)
        shared_S = conversion.layout.shared_neurons(layer)
        if len(shared_S):
            for spec in _linears(conversion, layer, shared_S[None], f"{prefix}.shared_mlp", 1.0):
                yield _only(spec)

    def router(self, block: nn.Module) -> nn.Module:
        """See `StockMoe.router`."""
        return block.get_submodule("router")


def _linears(
    conversion: Conversion, layer: int, neurons_ES: Tensor, prefix: str, factor: float
) -> Iterator[TensorSpec]:
    """Gate and up projections of all experts, [E, 2 S, D], and the down ones, [E, D, S]."""
    num_experts, size = neurons_ES.shape
    width = conversion.dense.widths.model

    def of_all(projection: str, factor: float = 1.0) -> Tensor:
        neurons_N = neurons_ES.flatten()
        spec = specs.neurons(conversion, layer, projection, neurons_N, "", factor=factor)
        matrix = spec.make()
        if projection == "down":
            return matrix.view(width, num_experts, size).transpose(0, 1).contiguous()
        return matrix.view(num_experts, size, width)

    yield TensorSpec(
        name=f"{prefix}.input_linear.weight",
        shape=(num_experts, 2 * size, width),
        dtype=conversion.dtype,
        make=lambda: torch.cat([of_all("gate"), of_all("up")], dim=1),
    )
    yield TensorSpec(
        name=f"{prefix}.output_linear.weight",
        shape=(num_experts, width, size),
        dtype=conversion.dtype,
        make=lambda: of_all("down", factor),
    )


def _only(spec: TensorSpec) -> TensorSpec:
    """The single expert of a tensor of experts."""
    return TensorSpec(
        name=spec.name, shape=spec.shape[1:], dtype=spec.dtype, make=lambda: spec.make()[0]
    )
