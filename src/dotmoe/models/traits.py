"""Plain facts that a family states about its models."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionTraits:
    """Attention features that an output architecture must be able to hold."""

    qkv_bias: bool
    """Biases on the query, key and value projections."""
    qk_norm: bool
    """RMSNorm on each query and key head."""
    head_dim: int
    """Width of one head; need not be hidden_size / heads."""
    sliding_window: int | None
    """Tokens a layer looks back, or None for full attention."""


@dataclass(frozen=True, slots=True)
class GatedFFN:
    """Projections of one FFN: down(SiLU(gate(x)) * up(x)) (eq:ffn_intermediate, eq:ffn_output)."""

    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
