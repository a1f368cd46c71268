"""What all exported Transformers architectures share: a decoder in LLaMA's form with new FFNs."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from dotmoe.artifacts import DenseModel
from dotmoe.export import tensor_specs as specs
from dotmoe.export.architecture import Conversion, TensorSpec
from dotmoe.export.decoder_config import REQUIRED_KEYS, decoder_config, exported_context
from dotmoe.export.dense_tensors import EMBEDDING, HEAD
from dotmoe.export.gating import Gating
from dotmoe.export.holds import Holds, misfit
from dotmoe.granularity import Granularity
from dotmoe.layout import ExpertLayout

EXACT_BLOCK_RATIO, FOLDED_BLOCK_RATIO = 1.3, 1.6
"""Largest block error below float32, in those of the masked FFN: where expert weights are the dense
ones, and where a constant is folded into them, which rounds once more."""


class StockMoe(ABC):
    """Base of the outputs; a subclass says what is its own. See `OutputArchitecture`."""

    name: str
    class_name: str
    holds: Holds
    servers: tuple[str, ...]
    exactness: str = (
        "expert weights rounded once, down projections times k; gates 1 but for about 2^-11"
    )
    experts_key: str = "num_experts"
    active_experts_key: str = "num_experts_per_tok"
    active_experts_editable: bool = False
    router_name: str = "mlp.gate.weight"
    block_name: str = "mlp"
    block_has_shared: bool
    block_error: float = 2e-3
    block_ratio: float = FOLDED_BLOCK_RATIO
    moe_keys: tuple[str, ...]
    """Keys of `moe_config` that no runtime may have to guess."""

    @property
    def required_keys(self) -> tuple[str, ...]:
        """See `OutputArchitecture.required_keys`."""
        return (*REQUIRED_KEYS, self.experts_key, self.active_experts_key, *self.moe_keys)

    def refusal(
        self, dense: DenseModel, granularity: Granularity, dtype: torch.dtype
    ) -> str | None:
        """See `OutputArchitecture.refusal`."""
        return misfit(self.name, self.holds, dense, granularity, dtype)

    @abstractmethod
    def gating(self, granularity: Granularity) -> Gating:
        """See `OutputArchitecture.gating`."""

    def context(self, dense: DenseModel) -> int:
        """See `OutputArchitecture.context`."""
        return dense.widths.context if self.holds.sliding_window else exported_context(dense)

    def notes(self, dense: DenseModel, layout: ExpertLayout) -> list[str]:
        """See `OutputArchitecture.notes`."""
        notes = [
            "For inference only: the scaled router passes almost no gradient. Fine-tune before "
            "export.",
            *self.own_notes(layout),
        ]
        if self.context(dense) < dense.widths.context:
            notes.append(
                f"The dense model attends through a sliding window of {self.context(dense)} "
                f"tokens, which {self.name} has not: max_position_embeddings is lowered from "
                f"{dense.widths.context} to the window, up to which the two are the same."
            )
        return notes

    def own_notes(self, layout: ExpertLayout) -> list[str]:
        """What is special to this architecture."""
        return [
            f"{self.active_experts_key} cannot be edited: k is folded into the down projections. "
            "Export the run again with another --active-experts."
        ]

    def config(self, conversion: Conversion) -> dict[str, Any]:
        """See `OutputArchitecture.config`."""
        dense, layout = conversion.dense, conversion.layout
        return {
            "architectures": [self.class_name],
            "model_type": self.name,
            **decoder_config(dense, conversion.dtype, context=self.context(dense)),
            self.experts_key: layout.num_experts,
            self.active_experts_key: layout.active_experts,
            **self.moe_config(conversion),
            "output_router_logits": False,
        }

    @abstractmethod
    def moe_config(self, conversion: Conversion) -> dict[str, Any]:
        """What config.json says of the experts besides E and k."""

    def tensors(self, conversion: Conversion) -> Iterator[TensorSpec]:
        """See `OutputArchitecture.tensors`."""
        specs.require_no_strangers(conversion, self.name)
        yield specs.carried(conversion, EMBEDDING)
        for layer in range(conversion.layout.num_layers):
            for name in specs.carried_names(conversion.dense, layer):
                yield specs.carried(conversion, name)
            if layer in conversion.layout.moe_layers:
                yield from self.moe_tensors(conversion, layer)
            else:
                yield from specs.dense_ffn(conversion, layer)
        yield specs.carried(conversion, specs.NORM)
        yield specs.carried(conversion, HEAD)

    def moe_tensors(self, conversion: Conversion, layer: int) -> Iterator[TensorSpec]:
        """Router and experts of a split layer."""
        prefix = f"model.layers.{layer}"
        yield specs.router(conversion, layer, f"{prefix}.{self.router_name}")
        yield from specs.experts(
            conversion,
            layer,
            lambda expert, projection: f"{prefix}.{self.expert_tensor(expert, projection)}",
            factor=self.down_factor(conversion.granularity),
        )

    def expert_tensor(self, expert: int, projection: str) -> str:
        """Name of an expert's projection within its layer."""
        return f"mlp.experts.{expert}.{projection}_proj.weight"

    def down_factor(self, granularity: Granularity) -> float:
        """What the down projections of the experts are multiplied by."""
        return self.gating(granularity).constant

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """See `OutputArchitecture.blocks`."""
        layers = cast(nn.ModuleList, model.get_submodule("model.layers"))
        return [layer.get_submodule(self.block_name) for layer in layers]

    def router(self, block: nn.Module) -> nn.Module:
        """The router of a reloaded block; called with [T, D] it gives the chosen experts last."""
        return block.get_submodule("gate")

    def chosen_experts(self, block: nn.Module, x_TD: Tensor) -> Tensor:
        """See `OutputArchitecture.chosen_experts`."""
        _, _, chosen_TK = self.router(block)(x_TD)
        return cast(Tensor, chosen_TK)

    def set_active_experts(self, model: nn.Module, layout: ExpertLayout) -> None:
        """See `OutputArchitecture.set_active_experts`."""
        self.run_active_experts(model, layout.moe_layers, layout.active_experts)

    def run_active_experts(self, model: nn.Module, layers: range, active_experts: int) -> None:
        """Give the split layers of a reloaded model another k."""
        assert self.active_experts_editable, self.name
        setattr(cast(Any, model).config, self.active_experts_key, active_experts)
        blocks = self.blocks(model)
        for layer in layers:
            cast(Any, self.router(blocks[layer])).top_k = active_experts
