"""Exact parameter counts of a dense model and its MoE, from the Hugging Face config alone."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from dotmoe.errors import UserError
from dotmoe.granularity import Granularity, parts_of
from dotmoe.models.family import Family


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """Counts of whole parameters; a tied output head is counted once."""

    dense_total: int
    stored: int
    """The dense model's and the routers', less what is dropped: what files must hold."""
    active: int
    """Parameters that work on one token, without routers: the figure that papers print."""
    active_with_routers: int
    """The same with the router rows, all of which are read for every token."""
    active_without_embeddings: int
    """`active` without the input embedding and the output head."""
    floor: int
    """What conversion cannot remove: everything outside what is split."""
    attention_and_norms: int
    input_embedding: int
    """The token embedding (and the head, if tied to it)."""
    output_head: int
    """The output projection; 0 if tied to the embedding."""
    ffn_total: int
    ffn_active: int
    """FFN parameters that work on one token."""
    heads_total: int
    """Those that belong to one query head each, in W_Q and W_O; 0 where attention is not split."""
    routers: int
    """Router rows of all split layers."""

    @property
    def active_fraction(self) -> float:
        """`active / dense_total`: what is left of the model, unlike the share of FFN neurons."""
        return self.active / self.dense_total


def meta_model(config: Any, dtype: torch.dtype | None = None) -> nn.Module:
    """The stock model of a config, frozen, without storage, in `dtype` or that of the config."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype or config.dtype
        )
    return model.requires_grad_(False).eval()


def compute_constants(model: nn.Module, device: torch.device) -> None:
    """Make the modules anew that hold what no checkpoint stores: rotary frequencies."""
    config = model.config
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            buffers = {key for key, _ in child.named_buffers(recurse=False)}
            if buffers - child.state_dict().keys():
                setattr(parent, name, type(child)(config).to(device))


def count_parameters(config: Any, family: Family, granularity: Granularity) -> ParameterCounts:
    """Exact counts of a dense model and its split.

        active = all - (1 - k / E) * FFN        (FFN = 3 * d * d_ffn * L)
        stored = all + L * E * d - 3 * d * dropped * L

    where L counts the split layers only, and a shared expert is active. Of attention, 1 - k / E of
    W_Q and W_O (2 * d * d_h * N_h * L, and a bias of queries) is idle; of W_O alone where all
    queries are normed at once, since that needs them all. The split must be of the model's units.
    """
    model, traits = meta_model(config), family.traits(config)
    total, width = num_parameters(model), config.hidden_size
    ffn_total = 3 * width * config.intermediate_size * config.num_hidden_layers
    embedding = model.get_input_embeddings().weight.numel()  # type: ignore[operator]
    head = total - num_parameters(family.trunk(model))
    of_a_query = 0 if traits.qk_norm == "full" else width + traits.qkv_bias
    of_a_unit = {"ffn": 3 * width, "attention": traits.head_dim * (width + of_a_query)}
    whole, idle = {"ffn": 0, "attention": 0}, {"ffn": 0, "attention": 0}
    dropped = routers = 0
    for split in parts_of(granularity):
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


def nearest_active_experts(
    share: float, config: Any, family: Family, granularity: Granularity
) -> int:
    """The k at which about that share of the dense model's parameters works on one token.

    Of a split of FFNs without a shared expert, whose own k does not matter; shared experts that are
    to be are counted in k. A `UserError`: one expert a layer is more than that.
    """
    experts, one = granularity.num_experts, replace(granularity, active_experts=1)
    least = count_parameters(config, family, one)
    an_expert = (least.dense_total - least.active) / (experts - 1)
    active = experts - round((1 - share) * least.dense_total / an_expert)
    if active < 1:
        raise UserError(
            f"active_params is {share:g}, but {least.active_fraction:.3f} of the parameters work "
            "on a token where one expert a layer runs. Choose at least that."
        )
    return active


def num_parameters(module: nn.Module) -> int:
    """Parameters of a module; a tied head is counted once."""
    return sum(parameter.numel() for parameter in module.parameters())
