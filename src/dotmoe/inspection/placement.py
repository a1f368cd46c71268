"""How one model is placed on several GPUs, and the bytes that each of them holds of it.

The frozen weights are whole on every GPU, or sharded as FSDP2 does it: every tensor by rows, and a
decoder layer whole only while it runs. Affinities and their Adam moments are always divided by
layer, since each layer's transport is solved by one rank; routers are small and whole everywhere.
"""

from dataclasses import dataclass

from dotmoe.inspection.sizes import Sizes

GATHERED_LAYERS = 2
"""Sharded decoder layers that are whole at one moment: the one that runs, and the next one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Over how many GPUs, and whether the dense weights are sharded."""

    ranks: int = 1
    """GPUs of all nodes."""
    sharded: bool = False
    """Each GPU keeps a part of every dense weight."""


ALONE = Placement()


def layer_parameters(sizes: Sizes) -> int:
    """Parameters of one decoder layer: attention, its norms, FFN."""
    # The last norm, of the model width, belongs to no layer.
    in_layers = sizes.counts.attention_and_norms - sizes.widths.model + sizes.counts.ffn_total
    return in_layers // sizes.widths.layers


def shard(parameters: int, placement: Placement) -> int:
    """The part of so many parameters on one GPU; where they do not divide, the largest."""
    return -(-parameters // placement.ranks)


def gathered_parameters(sizes: Sizes) -> int:
    """Sharded parameters that are whole at one moment: two layers, or the head's matrix."""
    layers = min(GATHERED_LAYERS, sizes.widths.layers) * layer_parameters(sizes)
    return max(layers, sizes.widths.vocabulary * sizes.widths.model)


def frozen_bytes(sizes: Sizes, placement: Placement) -> int:
    """Bytes of dense weights on one GPU, what is gathered for a moment included."""
    parameters = sizes.counts.dense_total
    if placement.sharded and placement.ranks > 1:
        parameters = shard(parameters, placement) + gathered_parameters(sizes)
    return sizes.bytes_held * parameters


def affinity_entries(sizes: Sizes, placement: Placement) -> int:
    """Entries of A on one GPU, [L / ranks, N, E]; where layers do not divide, the most."""
    layers = -(-sizes.widths.layers // placement.ranks)
    return layers * sizes.widths.ffn * sizes.granularity.num_experts
