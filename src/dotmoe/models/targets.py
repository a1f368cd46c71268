"""The parts of a decoder layer that can be split into experts (`TARGETS`).

A target ends in one output projection, and a unit owns some columns of it: an FFN neuron one column
of `down_proj`, a query head the columns of `o_proj` that read its output.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from dotmoe.models.hf_config import head_dim


class Target(NamedTuple):
    """A part of a decoder layer whose units are grouped into experts."""

    name: str
    units_named: str
    whole: str
    """What the units are parts of, as tables call it."""
    module: str
    """LLaMA's name of the module in a layer; the router reads the module's input."""
    output_name: str
    """Name of the output projection, which no family fuses."""
    units: Callable[[Any], int]
    """Number of units of a layer (N), by a model's config."""
    unit_width: Callable[[Any], int]
    """Number of columns of the output projection per unit, by a model's config."""

    def inputs(self, config: Any) -> int:
        """Number of columns of the output projection."""
        return self.units(config) * self.unit_width(config)

    def output_tensor(self, layer: int) -> str:
        """Name of the output projection's weight, in LLaMA's form."""
        return f"model.layers.{layer}.{self.module}.{self.output_name}.weight"

    def of_columns(self, values_TN: Tensor, config: Any) -> Tensor:
        """Repeat values of units, [..., N], for each unit's columns of the output projection."""
        return values_TN.repeat_interleave(self.unit_width(config), dim=-1)


def _num_neurons(config: Any) -> int:
    return int(config.intermediate_size)


def _num_heads(config: Any) -> int:
    return int(config.num_attention_heads)


def _one_column(_config: Any) -> int:
    return 1


_FFN = Target(
    name="ffn",
    units_named="FFN neurons",
    whole="FFN",
    module="mlp",
    output_name="down_proj",
    units=_num_neurons,
    unit_width=_one_column,
)
_ATTENTION = Target(
    name="attention",
    units_named="query heads",
    whole="attention",
    module="self_attn",
    output_name="o_proj",
    units=_num_heads,
    unit_width=head_dim,
)
TARGETS = {target.name: target for target in (_FFN, _ATTENTION)}
"""Targets by name; if both are split, in this order."""
