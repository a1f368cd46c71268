"""What the options of a conversion mean for a model: its experts, and how its method trains."""

from dataclasses import replace
from typing import Any, TypeVar

import torch

from dotmoe.export.write import settled_experts
from dotmoe.method.granularity import Splits, splits_of
from dotmoe.models.chat import has_chats
from dotmoe.models.family import DenseModel
from dotmoe.rivals.baselines import granularity_of
from dotmoe.run.config import RunConfig
from dotmoe.text.sources import PROMPTS, SELF

Conversion = TypeVar("Conversion", bound=RunConfig)


def settled(config: Conversion, dense: DenseModel, dtype: torch.dtype) -> Conversion:
    """The config with the experts that its defaults mean for the model, see `settled_experts`.

    For a method other than DOT-MoE, `align` is set as that method needs it: it trains its
    router for `router_steps`, and keeps its experts. `dtype` is that of the export.
    """
    if not config.data.data:
        sources = default_sources(dense.tokenizer)
        config = replace(config, data=replace(config.data, data=sources))
    experts = config.experts
    if config.method != "dot_moe":  # those with a shared expert choose its size themselves
        experts = replace(experts, shared=experts.shared or 0.0)
    experts = settled_experts(experts, dense, config.export.format, dtype)
    if config.method == "dot_moe":
        return replace(config, experts=experts)
    align = replace(config.align, steps=config.baseline.router_steps, learn_assignment=False)
    return replace(config, experts=experts, align=align)


def default_sources(tokenizer: Any) -> tuple[str, ...]:
    """Sources of text of a run that names none: the model answers; a base model just goes on."""
    return (PROMPTS, SELF) if has_chats(tokenizer) else (SELF,)


def splits_for(method: str, config: RunConfig, dense: DenseModel, dtype: torch.dtype) -> Splits:
    """The splits that a config means, as a method uses them, or a `UserError` if it cannot."""
    experts = settled_experts(config.experts, dense, config.export.format, dtype)
    requested = splits_of(experts, dense.widths.ffn, dense.config.num_attention_heads)
    return tuple(granularity_of(method, split) for split in requested)
