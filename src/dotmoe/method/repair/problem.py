"""The problem that a repair solves in one FFN or attention."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dotmoe.method.layout import ExpertLayout
from dotmoe.models.family import GatedFFN
from dotmoe.models.stream import TOKENS_AT_ONCE
from dotmoe.models.targets import Target

LARGEST_WEIGHT = 10.0
"""Largest weight of a token; one of median size has 1."""


def tokens_at_once(device: torch.device) -> int:
    """Tokens that experts run on at once: a CPU gets memory for the rows of more anew each time."""
    return 1_024 if device.type == "cpu" else TOKENS_AT_ONCE


@dataclass(frozen=True, kw_only=True, slots=True)
class FFNTask:
    """What an FFN gets and what it should give, for all tokens of this rank."""

    inputs_BTD: Tensor
    """Inputs, on the device or on the host."""
    wanted_BTD: Tensor
    """What the FFN, with its norm, should give for them, in the same place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProblem:
    """One FFN or attention under its masks, and what its output lacks to follow the dense model.

    It holds while the streams stand before this FFN or attention. Each rank has tokens of its own,
    as many rows of text as the others. B: rows of text, T: tokens of a row, D: width of the model,
    N: inputs of the output projection.
    """

    layer: int
    target: Target
    layout: ExpertLayout
    block: nn.Module
    """The FFN or attention; it runs masked."""
    name: str
    """The block's name in the model."""
    output: nn.Linear
    """The block's output projection."""
    output_name: str
    """Name of its weight in the model."""
    norm: nn.Module
    """The norm (or identity) between the block and the stream, before a residual multiplier."""
    gain_D: Tensor | None
    """What that norm multiplies by; None for the identity."""
    ffn: GatedFFN
    """The layer's FFN with its projections apart."""
    group_of_N: Tensor
    """Group of each input of the output projection, in which the refit sums them: its expert, E if
    it is dropped, E + 1 if it is always on."""
    parts: list[slice]
    """Rows of text that run at once: either all to fit or all held out."""
    num_fitted: int
    """So many rows of text are to fit; the others, behind them, are held out."""
    weight_BT: Tensor
    """Weight of each token's square error, from 0 to 10; where the inputs are."""
    ffn_task: FFNTask | None
    """Inputs of the FFN and what it should give; None for attention."""
    lacking: Callable[[slice], Tensor]
    """Runs the masked block, with its weights of now, on one of `parts`; gives what its output,
    behind the norm, lacks: [b, T, D] in float32."""
