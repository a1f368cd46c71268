"""What decoders differ in beside their weights: activation, factors, norms, biases, readout."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Multipliers(NamedTuple):
    """Constant factors in a decoder, as in Granite; the defaults change nothing."""

    embedding: float = 1.0
    residual: float = 1.0
    """Factor of what attention and FFN add to the residual stream."""
    attention: float | None = None
    """Factor of the attention scores; None: 1 / sqrt(head_dim)."""
    logits_divisor: float = 1.0


class Activation(NamedTuple):
    """The function of a gate, elementwise, and its gradient."""

    name: str
    apply: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    """Maps dL/d(output) and the input to dL/d(input)."""


SILU = Activation("SiLU", F.silu, torch.ops.aten.silu_backward)


GELU = Activation(
    "tanh GELU",
    partial(F.gelu, approximate="tanh"),
    partial(torch.ops.aten.gelu_backward, approximate="tanh"),
)


class Readout(NamedTuple):
    """How logits follow from the product z of hidden states and head: cap tanh(factor z / cap)."""

    factor: float = 1.0
    """Factor of all logits, as in Granite and Cohere."""
    cap: float | None = None
    """Bound of a logit's size, as in Gemma; None: logits are factor z."""

    def logits(self, product_TV: Tensor) -> Tensor:
        """Logits in float32, [T, V]."""
        logits_TV = product_TV.float() if self.factor == 1 else product_TV.float() * self.factor
        return logits_TV if self.cap is None else torch.tanh(logits_TV / self.cap) * self.cap

    def slope(self, logits_TV: Tensor) -> Tensor | float:
        """d(logit)/dz: [T, V], or one number where it is the same everywhere."""
        if self.cap is None:
            return self.factor
        return (logits_TV / self.cap).square().neg_().add_(1).mul_(self.factor)


PLAIN = Readout()


ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU}
"""Activation functions of gates, by their names in configs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderTraits:
    """Features outside the FFN that an output architecture must be able to hold."""

    head_dim: int
    """Width of one attention head; it may differ from hidden_size / heads."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Whether the attention's output projection has a bias."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm of queries and keys: none, on each head, or over all heads at once."""
    has_own_decoder: bool = False
    """Whether these traits leave out how the decoder computes; see `Family.has_own_decoder`."""
    norms_after: bool = False
    """Whether RMSNorms follow attention and FFN, in the residual branch; none precede them, except
    in a decoder of its own."""
    sliding_window: int | None = None
    """Size of the attention window in tokens; None for full attention."""
    all_slide: bool = True
    """Whether all layers have the window, not some."""
    scaled_from: int | None = None
    """Position from which on queries are scaled, as in Ministral 3; None: none are."""
    activation: str = SILU.name
    """Name of the FFNs' activation function."""
    rotated: float = 1.0
    """Share of each head that rotary embeddings rotate, above 0, at most 1."""
    multipliers: Multipliers = field(default_factory=Multipliers)
