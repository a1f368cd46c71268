"""Exact parameter counts of a model and its split, from the shapes of its weights."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from dotmoe.method.granularity import Granularity, Splits
from dotmoe.models.family import Family
from dotmoe.models.meta_model import num_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """Exact parameter counts of a split model; a tied output head is counted once."""

    dense_total: int
    stored: int
    """Parameters of the dense model and the routers, less dropped ones: what files must hold."""
    active: int
    """Parameters that work on one token, without routers: the number that papers report."""
    active_with_routers: int
    """`active` plus the router rows, all of which are read for every token."""
    active_without_embeddings: int
    """`active` without the input embedding and the output head."""
    floor: int
    """Parameters outside the units of the split targets."""
    attention_and_norms: int
    input_embedding: int
    """The token embedding (and the head, if tied to it)."""
    output_head: int
    """The output projection; 0 if tied to the embedding."""
    ffn_total: int
    ffn_active: int
    """FFN parameters that work on one token."""
    heads_total: int
    """Parameters of single query heads, in W_Q and W_O; 0 if attention is not split."""
    routers: int
    """Parameters of the router rows of all split layers."""


def count_parameters(model: nn.Module, family: Family, splits: Splits) -> ParameterCounts:
    """Exact counts of a dense model, which may be without weights, and its splits.

        active = all - (1 - k / E) * FFN        (FFN = 3 * d * d_ffn * L)
        stored = all + L * E * d - 3 * d * dropped * L

    where L counts only the split layers, and a shared expert is active. In attention, 1 - k / E of
    W_Q and W_O (2 * d * d_h * N_h * L, and a bias of queries) is idle; only of W_O if all queries
    are normed at once, which needs all of them. The splits must be of the model's own units.
    """
    config: Any = model.config
    traits = family.traits(model)
    total, width = num_parameters(model), config.hidden_size
    ffn_total = 3 * width * config.intermediate_size * config.num_hidden_layers
    embedding = model.get_input_embeddings().weight.numel()  # type: ignore[operator]
    head = total - num_parameters(model.get_submodule("model"))
    of_a_query = width + 1 if traits.qkv_bias else width
    if traits.qk_norm == "full":
        of_a_query = 0
    of_a_unit = {"ffn": 3 * width, "attention": traits.head_dim * (width + of_a_query)}
    whole, idle = {"ffn": 0, "attention": 0}, {"ffn": 0, "attention": 0}
    dropped = routers = 0
    for split in splits:
        layers = config.num_hidden_layers - split.first_dense_layers
        size = of_a_unit[split.target]
        whole[split.target] = config.num_hidden_layers * split.units * size
        idle[split.target] = layers * (split.units - split.active_units) * size
        dropped += layers * split.dropped_size * size
        routers += layers * split.num_experts * width
    active = total - sum(idle.values())
    return ParameterCounts(
        dense_total=total,
        stored=total + routers - dropped,
        active=active,
        active_with_routers=active + routers,
        active_without_embeddings=active - embedding - head,
        floor=total - sum(whole.values()),
        attention_and_norms=total - ffn_total - embedding - head,
        input_embedding=embedding,
        output_head=head,
        ffn_total=ffn_total,
        ffn_active=ffn_total - idle["ffn"],
        heads_total=whole["attention"],
        routers=routers,
    )


def active_at(share: float, split: Granularity, dense: int, active: int) -> int:
    """Parameters that work on a token if this share of the neurons runs, not that of the split.

    `dense` and `active` are the parameters of the dense model and of the split.
    """
    idle_share = 1 - split.active_fraction
    if idle_share == 0:
        return active
    split_ffns = (dense - active) / idle_share
    return round(dense - (1 - share) * split_ffns)
