"""Plain facts that a family states about its models."""

from dataclasses import dataclass, field
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Multipliers:
    """Constant factors of a decoder, as Granite has them; 1 and None: none."""

    embedding: float = 1.0
    """Token embeddings are multiplied by it."""
    residual: float = 1.0
    """What attention and FFN add to the residual stream is multiplied by it."""
    attention: float | None = None
    """Factor of the attention scores; None: 1 / sqrt(head_dim)."""
    logits_divisor: float = 1.0
    """Logits are divided by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderTraits:
    """Features outside the FFN that an output architecture must be able to hold."""

    head_dim: int
    """Width of one head; need not be hidden_size / heads."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    output_bias: bool = False
    """A bias on the attention's output projection."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm of queries and keys: none, on each head, or over all heads at once."""
    norms_after: bool = False
    """RMSNorms after attention and FFN, inside the residual branch, instead of before them."""
    sliding_window: int | None = None
    """Tokens a layer looks back, or None for full attention."""
    multipliers: Multipliers = field(default_factory=Multipliers)


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Where a tensor lies in a checkpoint: a stored tensor, or some of its rows."""

    stored: str
    """Name in the files."""
    rows: tuple[int, int] | None = None
    """First row and the row after the last; None: all."""


class Rows(nn.Module):
    """Some rows of a fused projection, called like a projection of its own; nothing is copied."""

    def __init__(self, fused: nn.Linear, start: int, stop: int) -> None:
        super().__init__()
        self._fused = (fused,)  # in a tuple: not registered a second time
        self._rows = slice(start, stop)

    @property
    def weight(self) -> Tensor:
        """The rows, a view."""
        return self._fused[0].weight[self._rows]

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., rows]."""
        return F.linear(x, self.weight)


@dataclass(frozen=True, slots=True)
class GatedFFN:
    """Projections of one FFN: down(SiLU(gate(x)) * up(x)) (eq:ffn_intermediate, eq:ffn_output)."""

    gate: nn.Linear | Rows
    up: nn.Linear | Rows
    down: nn.Linear
