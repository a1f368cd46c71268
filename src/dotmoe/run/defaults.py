"""What the defaults of a conversion mean for a model: its text, its experts, its training."""

from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from dotmoe.common.errors import UserError
from dotmoe.export.choice import format_for
from dotmoe.export.gguf_limits import room_in_llama_cpp
from dotmoe.method.config import ExpertsConfig
from dotmoe.method.dense_layers import LAYERS_PER_DENSE
from dotmoe.method.granularity import (
    DEFAULT_ACTIVE,
    FEWEST_DEFAULT_EXPERTS,
    Splits,
    default_expert_size,
    fitting_sizes,
    splits_of,
)
from dotmoe.models.chat import has_chats
from dotmoe.models.dense_model import DenseModel
from dotmoe.rivals.baselines import granularity_of
from dotmoe.run.config import RunConfig
from dotmoe.text.config import PROMPTS, SELF

Conversion = TypeVar("Conversion", bound=RunConfig)


def with_defaults(config: Conversion, dense: DenseModel, dtype: torch.dtype) -> Conversion:
    """The config with the text and experts that its defaults mean, see `experts_with_defaults`.

    For a method other than DOT-MoE, `align` is set as that method needs it: it trains its
    router for `router_steps`, and keeps its experts. `dtype` is that of the export.
    """
    config = with_sources(config, is_chat=has_chats(dense.tokenizer))
    experts = with_size(config.experts, dense, config.export.format, dtype)
    if config.method != "dot_moe":  # those with a shared expert choose its size themselves
        experts = replace(experts, shared=experts.shared or 0.0)
    experts = experts_with_defaults(experts, dense, config.export.format, dtype)
    if config.method == "dot_moe":
        return replace(config, experts=experts)
    align = replace(config.align, steps=config.baseline.router_steps, learn_assignment=False)
    return replace(config, experts=experts, align=align)


def with_sources(config: Conversion, *, is_chat: bool) -> Conversion:
    """The config with the sources of text that its default means."""
    if config.data.data:
        return config
    sources = default_sources(is_chat=is_chat)
    return replace(config, data=replace(config.data, data=sources))


def default_sources(*, is_chat: bool) -> tuple[str, ...]:
    """Sources of text of a run that names none: the model answers; a base model just goes on."""
    return (PROMPTS, SELF) if is_chat else (SELF,)


def experts_with_defaults(
    experts: ExpertsConfig, dense: DenseModel, name: str, dtype: torch.dtype
) -> ExpertsConfig:
    """The options with the values that their defaults mean for this model and format name.

    Three quarters of the FFN run. Where a format holds it without a shorter context, half of what
    runs is always on, and the number of leading dense layers stays open, to be measured on text;
    elsewhere both are 0, as they are if attention is split. Values that are given stay as they are.
    With `keep` all of it stays open, to be chosen by what a share keeps.
    """
    if experts.keep is not None:
        return experts
    context = partial(_longest_context, dense=dense, name=name, dtype=dtype)

    def is_free(experts: ExpertsConfig, plain: ExpertsConfig) -> bool:
        """Whether a format holds these experts with a context as long as that of the plain ones."""
        return experts.targets == "ffn" and context(experts) >= max(1, context(plain))

    if experts.active is None and experts.active_experts is None:
        experts = replace(experts, active=DEFAULT_ACTIVE)
    if experts.first_dense_layers is None:
        plain = replace(experts, shared=experts.shared or 0.0, first_dense_layers=0)
        is_short = dense.widths.layers < LAYERS_PER_DENSE
        if is_short or not is_free(replace(plain, first_dense_layers=1), plain):
            experts = replace(experts, first_dense_layers=0)
    if experts.shared is None:
        leading = experts.first_dense_layers or 0
        plain = replace(experts, shared=0.0, first_dense_layers=leading)
        split = _splits_of_model(plain, dense)[0]
        half = split.active_experts // 2 / split.num_experts
        is_shared = is_free(replace(plain, shared=half), plain)
        experts = replace(experts, shared=half if is_shared else 0.0)
    return experts


def with_size(
    experts: ExpertsConfig, dense: DenseModel, name: str, dtype: torch.dtype
) -> ExpertsConfig:
    """The options with a size of experts of which llama.cpp runs as many as run for a token.

    It runs at most some 28 to 40 a token, and with the default size more would run in models of 7B.
    Then the next larger size is taken that divides the FFN, is a multiple of 64 (of 8, if no such
    size serves), and leaves enough experts; if none serves, the default one stays. The options stay
    as they are if they say anything of experts but the active share, as the paper's recipes do, and
    if no GGUF can hold the model.
    """
    given = (experts.expert_size, experts.experts, experts.active_experts, experts.shared)
    if experts.targets != "ffn" or any(value is not None for value in given):
        return experts
    larger = _larger_sizes(default_expert_size(dense.widths.ffn), dense.widths.ffn)
    candidates = [experts, *(replace(experts, expert_size=size) for size in larger)]
    running = (each for each in candidates if _runs_in_llama_cpp(each, dense, name, dtype))
    return next(running, experts)


def _runs_in_llama_cpp(
    experts: ExpertsConfig, dense: DenseModel, name: str, dtype: torch.dtype
) -> bool:
    """Whether llama.cpp runs as many experts for a token as these options mean, at their share."""
    at_share = replace(experts, keep=None)
    splits = _splits_of_model(experts_with_defaults(at_share, dense, name, dtype), dense)
    return splits[0].active_experts <= room_in_llama_cpp(dense, splits)


def _larger_sizes(size: int, ffn_width: int) -> list[int]:
    """Larger sizes of experts of a layer, ascending: first multiples of 64, then those of 8."""
    largest = ffn_width // min(FEWEST_DEFAULT_EXPERTS)
    larger = [each for each in fitting_sizes(ffn_width) if size < each <= largest]
    whole = [each for each in larger if each % 64 == 0]
    return whole + [each for each in larger if each % 8 == 0 and each % 64 > 0]


def _splits_of_model(experts: ExpertsConfig, dense: DenseModel) -> Splits:
    return splits_of(experts, dense.widths.ffn, dense.config.num_attention_heads)


def _longest_context(
    experts: ExpertsConfig, *, dense: DenseModel, name: str, dtype: torch.dtype
) -> int:
    """Context of an export with these experts, 0 if no format holds them."""
    try:
        return format_for(dense, _splits_of_model(experts, dense), name, dtype).context(dense)
    except UserError:
        return 0


def splits_for(method: str, config: RunConfig, dense: DenseModel, dtype: torch.dtype) -> Splits:
    """The splits that a config means, as a method uses them, or a `UserError` if it cannot."""
    experts = with_size(config.experts, dense, config.export.format, dtype)
    experts = experts_with_defaults(experts, dense, config.export.format, dtype)
    return tuple(granularity_of(method, split) for split in _splits_of_model(experts, dense))
