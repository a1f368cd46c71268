"""The two kinds of run that can be planned, as memory, work and traffic of one step on one GPU."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dotmoe.inspection.costs import alignment_memory
from dotmoe.inspection.finetuning import (
    FinetuneSize,
    finetune_memory,
    finetune_work,
    trained_parameters,
)
from dotmoe.inspection.placement import Placement, layer_parameters
from dotmoe.inspection.sizes import Item, RunSize, Sizes
from dotmoe.inspection.work import Work, alignment_work, share_of

FLOAT32 = 4
ASSIGNMENT_ENTRY = 8
"""Bytes of the expert number of a neuron."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that one GPU exchanges with the others in one step."""

    gathered: int
    """Weights, for each pass over the layers; while the layer before computes."""
    reduced: int
    """Gradients, and what the owner of a part then tells the others."""
    at_end: bool
    """Reducing waits for the last micro-batch; else for a layer's backward, and is overlapped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """A and routers learn; teacher and student share frozen weights."""

    kind: ClassVar[Literal["align"]] = "align"

    def memory(
        self, sizes: Sizes, run: RunSize, placement: Placement, *, checkpointing: bool
    ) -> tuple[Item, ...]:
        """Peak of one step on one GPU, bytes."""
        return alignment_memory(sizes, run, checkpointing=checkpointing, placement=placement)

    def work(
        self, sizes: Sizes, run: RunSize, placement: Placement, *, checkpointing: bool
    ) -> tuple[Work, ...]:
        """One step on one GPU."""
        return alignment_work(sizes, run, checkpointing=checkpointing, placement=placement)

    def traffic(self, sizes: Sizes, run: RunSize, placement: Placement) -> Traffic:
        """Layers are gathered for teacher, student and backward of every micro-batch.

        The plan's gradient is reduced to the owner of each layer, which tells all the assignment;
        gradients of routers are summed everywhere.
        """
        widths = sizes.widths
        plan = FLOAT32 * (sizes.trainables - sizes.counts.routers)
        assignment = ASSIGNMENT_ENTRY * widths.layers * widths.ffn
        return Traffic(
            gathered=_gathered(sizes, run, placement, passes=3),
            reduced=plan + assignment + 2 * FLOAT32 * sizes.counts.routers,
            at_end=True,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Finetuning:
    """The sparse model learns to predict the next token."""

    size: FinetuneSize
    kind: ClassVar[Literal["finetune"]] = "finetune"

    def memory(
        self, sizes: Sizes, run: RunSize, placement: Placement, *, checkpointing: bool
    ) -> tuple[Item, ...]:
        """Peak of one step on one GPU, bytes."""
        return finetune_memory(
            sizes, run, self.size, checkpointing=checkpointing, placement=placement
        )

    def work(
        self, sizes: Sizes, run: RunSize, placement: Placement, *, checkpointing: bool
    ) -> tuple[Work, ...]:
        """One step on one GPU."""
        return finetune_work(
            sizes, run, self.size, checkpointing=checkpointing, placement=placement
        )

    def traffic(self, sizes: Sizes, run: RunSize, placement: Placement) -> Traffic:
        """Layers are gathered for forward and backward of every micro-batch.

        Gradients are summed on every GPU; those of sharded weights, to their owner only, but of
        every micro-batch.
        """
        trained = FLOAT32 * trained_parameters(sizes, self.size)
        owned = placement.sharded and self.size.train == "everything"
        times = share_of(run, placement).micro_batches if owned else 2
        return Traffic(
            gathered=_gathered(sizes, run, placement, passes=2),
            reduced=times * trained,
            at_end=False,
        )


def _gathered(sizes: Sizes, run: RunSize, placement: Placement, *, passes: int) -> int:
    if not placement.sharded:
        return 0
    weights = sizes.bytes_held * sizes.widths.layers * layer_parameters(sizes)
    return passes * share_of(run, placement).micro_batches * weights
