"""What the estimates read: the size of a run, and all that matters of a model and its split."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from dotmoe.errors import UserError
from dotmoe.granularity import Granularity
from dotmoe.models.family import Widths, widths_of
from dotmoe.models.traits import DecoderTraits
from dotmoe.parameters import ParameterCounts

PAPER_TOKENS = 3_500 * 64 * 2_048
"""Tokens of the paper's alignment: steps, batch size, sequence length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSize:
    """Size of an alignment run, for estimates."""

    steps: int = 3_500
    """Optimizer steps; 0 for the training-free start alone. Paper: 3,500."""
    batch_size: int = 64
    """Sequences a step. Paper: 64 (tab:hyperparams_moefication)."""
    seq_len: int = 2_048
    """Tokens a sequence. Paper: 2,048 (tab:hyperparams_moefication)."""
    micro_batch_size: int = 4
    """Sequences that are in memory at once; at most `batch_size`."""
    bytes_per_weight: Literal[2, 4] | None = None
    """Bytes of a dense weight in memory. Left out: 4 on a CPU, the checkpoint's on a GPU."""
    calibration_tokens: int = 8_192
    """Tokens seen by the training-free start; 0 for none."""
    device: str = "auto"
    """Where it would run, and what is measured: cpu, cuda, or auto (a GPU if there is one)."""

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be run."""
        for name, least in (
            ("steps", 0),
            ("batch_size", 1),
            ("seq_len", 1),
            ("micro_batch_size", 1),
            ("calibration_tokens", 0),
        ):
            value = getattr(self, name)
            if value < least:
                raise UserError(f"{name} is {value}, but it must be at least {least}.")
        if self.micro_batch_size > self.batch_size:
            raise UserError(
                f"micro_batch_size is {self.micro_batch_size}, more than batch_size "
                f"{self.batch_size}. Choose 1 to {self.batch_size}."
            )
        if self.bytes_per_weight not in (2, 4, None):
            raise UserError(f"bytes_per_weight is {self.bytes_per_weight}. Choose 2 or 4.")

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.steps * self.batch_size * self.seq_len

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens in memory at once (T)."""
        return self.micro_batch_size * self.seq_len


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """All that the estimates read about a model and its split."""

    widths: Widths
    traits: DecoderTraits
    granularity: Granularity
    counts: ParameterCounts
    heads: int
    """Query heads a layer."""
    kv_heads: int
    """Key and value heads a layer."""
    stored: torch.dtype
    """Of the weights in the dense checkpoint."""
    written: torch.dtype
    """Of the weights in the exported checkpoint."""
    bytes_held: Literal[2, 4]
    """Bytes of a dense weight in memory while working."""

    @property
    def trainables(self) -> int:
        """Entries of A and of the routers."""
        return self.widths.layers * self.widths.ffn * self.granularity.num_experts + (
            self.counts.routers
        )


@dataclass(frozen=True, slots=True)
class Item:
    """One line of an estimate: bytes, or floating-point operations."""

    name: str
    amount: int


def total(items: tuple[Item, ...]) -> int:
    """Sum of the items."""
    return sum(item.amount for item in items)


def sizes_of(
    config: Any,
    traits: DecoderTraits,
    granularity: Granularity,
    counts: ParameterCounts,
    *,
    stored: torch.dtype,
    written: torch.dtype,
    bytes_held: Literal[2, 4],
) -> Sizes:
    """Gather what the estimates need, from a Hugging Face config and what was decided besides."""
    return Sizes(
        widths=widths_of(config),
        traits=traits,
        granularity=granularity,
        counts=counts,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        stored=stored,
        written=written,
        bytes_held=bytes_held,
    )
