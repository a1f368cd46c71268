"""What can be split into experts: the units of a part of every decoder layer.

A part ends in one output projection, and a unit is some columns of it: an FFN neuron one of
`down_proj`, a query head those of `o_proj` that read its output. All else treats both alike.
"""

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from dotmoe.models.family import head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A part of a decoder layer whose units are grouped into experts."""

    name: str
    units_named: str
    """What it is made of, for messages."""
    module: str
    """Its name in a decoder layer; what it is called with is what its router reads."""
    output_name: str
    """Its output projection, which every family has unfused."""
    norm_after: str
    """The norm of its output, in families that have one there."""

    def units(self, config: Any) -> int:
        """Units of a layer (N): neurons of its FFN, or query heads."""
        heads = self.name == "attention"
        return int(config.num_attention_heads if heads else config.intermediate_size)

    def unit_width(self, config: Any) -> int:
        """Columns of the output projection that are one unit's."""
        return head_dim(config) if self.name == "attention" else 1

    def inputs(self, config: Any) -> int:
        """Columns of the output projection."""
        return self.units(config) * self.unit_width(config)

    def block(self, layer: nn.Module) -> nn.Module:
        """The part itself."""
        return layer.get_submodule(self.module)

    def output(self, layer: nn.Module) -> nn.Linear:
        """Its output projection."""
        return cast(nn.Linear, layer.get_submodule(f"{self.module}.{self.output_name}"))

    def output_tensor(self, layer: int) -> str:
        """Name of the output projection's weight, in LLaMA's form."""
        return f"model.layers.{layer}.{self.module}.{self.output_name}.weight"

    def of_columns(self, values_TN: Tensor, config: Any) -> Tensor:
        """What is said of units, [..., N], said of the output projection's columns."""
        return values_TN.repeat_interleave(self.unit_width(config), dim=-1)


TARGETS = {
    "ffn": Target(
        name="ffn",
        units_named="FFN neurons",
        module="mlp",
        output_name="down_proj",
        norm_after="post_feedforward_layernorm",
    ),
    "attention": Target(
        name="attention",
        units_named="query heads",
        module="self_attn",
        output_name="o_proj",
        norm_after="post_attention_layernorm",
    ),
}
"""By name; where both are split, in this order."""
