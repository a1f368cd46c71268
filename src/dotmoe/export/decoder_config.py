"""Config keys that every decoder in LLaMA's form shares, readable by old and new runtimes alike."""

from typing import Any

import torch

from dotmoe.artifacts import DenseModel

EXACT_ROPE = ("default", "linear", "dynamic", "llama3", "yarn")
"""Rotary embeddings that the exported architectures compute as the dense one does."""

REQUIRED_KEYS = (
    "architectures",
    "model_type",
    "torch_dtype",
    "dtype",
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
)

_COPIED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rms_norm_eps",
    "initializer_range",
    "attention_dropout",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def decoder_config(dense: DenseModel, dtype: torch.dtype, *, context: int) -> dict[str, Any]:
    """Everything of config.json that does not depend on experts.

    Rotary settings and dtype are written twice: a runtime that knows only `rope_theta` falls back
    to its own default when it finds `rope_parameters` alone, and computes something else.

    Args:
        dense: The model that is exported.
        dtype: Dtype of the written weights.
        context: Longest context to state, in tokens.
    """
    source = dense.config
    traits = dense.family.traits(source)
    rope = dict(source.rope_parameters)
    theta = rope.pop("rope_theta")
    rope.pop("type", None)
    dtype_name = str(dtype).removeprefix("torch.")
    return {
        **{key: getattr(source, key, None) for key in _COPIED},
        "hidden_act": "silu",
        "intermediate_size": source.intermediate_size,
        "head_dim": traits.head_dim,
        "max_position_embeddings": context,
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else dict(rope),
        "rope_parameters": {**rope, "rope_theta": theta},
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name,
        "dtype": dtype_name,
    }


def exported_context(dense: DenseModel) -> int:
    """Longest context in which full attention equals the dense model's windowed attention."""
    window = dense.family.traits(dense.config).sliding_window
    context = dense.widths.context
    return context if window is None else min(window, context)


def rope_refusal(dense: DenseModel) -> str | None:
    """Why the rotary embedding cannot be exported exactly, or None."""
    kind = dense.config.rope_parameters.get("rope_type", "default")
    if kind not in EXACT_ROPE:
        return (
            f"rope_type is {kind!r}, but only {', '.join(EXACT_ROPE)} are exported exactly. "
            "Choose a model without it."
        )
    if kind == "dynamic" and exported_context(dense) < dense.widths.context:
        return (
            "rope_type is 'dynamic' together with a sliding window, and both depend on "
            "max_position_embeddings, which the export must lower. Choose a model without the two."
        )
    return None
