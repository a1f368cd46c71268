"""Metadata keys of a GGUF file: each must mean what Transformers has read, or change nothing.

Transformers reads only some keys, and takes its own defaults where a key is missing. Here what each
known key means to llama.cpp, or its absence, is compared with the config that was read.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dotmoe.common.errors import UserError
from dotmoe.models.hf_config import head_dim, rope_of

ANOTHER = "Name the model's own checkpoint folder."
REQUIRED = {
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
}
"""Keys without which llama.cpp does not run a file either."""
HARMLESS = {
    "tensor_data_layout",
    "rope.scaling.type",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_log_multiplier",
}
"""Keys that change nothing in a decoder without scaled rotary frequencies, which is checked."""
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the Gemmas whose attention llama.cpp scales by the width of a head in the model's."""


def require_meaning(path: Path, arch: str, stored: Mapping[str, Any], config: Any) -> None:
    """Refuse a file if a key means something else than the config that Transformers made of it.

    `stored` has the values of the architecture's keys, without its name before them.
    """
    stored = {key: _of_all_layers(value) for key, value in stored.items()}
    if config.model_type == "lfm2":  # layers without attention have no heads
        stored["attention.head_count_kv"] = config.num_key_value_heads
    _require_present(path, arch, stored)
    read = _as_read(config)
    implied = _implied(stored, config)
    for key in sorted(stored.keys() - HARMLESS):
        if key not in read:
            raise UserError(
                f"{path} has the key {arch}.{key} ({stored[key]!r}), which Transformers does not "
                f"read. {ANOTHER}"
            )
    for key, value in read.items():
        means = stored.get(key, implied.get(key))
        if key == "attention.sliding_window" and means and means >= read["context_length"]:
            means = None
        if not _is_same(means, value):
            what = f"is {means!r}" if key in stored else f"is not there, which means {means!r}"
            raise UserError(
                f"the key {arch}.{key} of {path} {what}, but Transformers reads {value!r}. "
                f"{ANOTHER}"
            )
    if getattr(config, "query_pre_attn_scalar", None) is not None:
        _require_scale(path, config)


def _require_scale(path: Path, config: Any) -> None:
    """Refuse a Gemma whose attention scores Transformers would scale otherwise."""
    meant = _scale_of_gemma(config)
    read = config.query_pre_attn_scalar
    if not _is_same(meant, read):
        raise UserError(
            f"{path} is a {config.model_type} whose attention is scaled by 1 / sqrt({meant:g}), "
            f"but Transformers reads {read:g}. {ANOTHER}"
        )


def _require_present(path: Path, arch: str, stored: Mapping[str, Any]) -> None:
    """Refuse a file without a size of its model, or with one for each layer."""
    for key in sorted(REQUIRED):
        if not stored.get(key):
            raise UserError(f"{path} lacks the key {arch}.{key}. Get the file again.")
        if isinstance(stored[key], list):
            raise UserError(
                f"the key {arch}.{key} of {path} differs by layer ({stored[key]}), and the stock "
                "class has one value for all. Choose another model."
            )


def _as_read(config: Any) -> dict[str, Any]:
    """The value of each key that would give this config."""
    width = head_dim(config)
    window = getattr(config, "sliding_window", None)
    if window is not None and window >= config.max_position_embeddings:
        window = None
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    rope = rope_of(config)
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": getattr(config, "norm_eps", None)
        or config.rms_norm_eps,
        "attention.sliding_window": window if "sliding_attention" in kinds else None,
        "attention.causal": True,
        "rope.dimension_count": round(width * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": rope["rope_theta"],
        "rope.scaling.factor": 1,
        "rope.scaling.attn_factor": 1,
        "rope.scale_linear": 1,
        "expert_count": 0,
        "expert_used_count": 0,
    }
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        values[key] = getattr(config, key, None)
    if local := config.rope_parameters.get("sliding_attention"):
        values["rope.freq_base_swa"] = local["rope_theta"]
    if config.model_type == "lfm2":
        values["shortconv.l_cache"] = config.conv_L_cache
    return values


def _implied(stored: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """What llama.cpp takes for keys that a file may leave out."""
    width = stored["embedding_length"] // stored["attention.head_count"]
    width = stored.get("attention.key_length", width)
    return {
        "vocab_size": config.vocab_size,  # the number of tokens; the embedding has as many rows
        "attention.head_count_kv": stored["attention.head_count"],
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.causal": True,
        "rope.dimension_count": width,
        "rope.freq_base": 10_000.0,
        "rope.freq_base_swa": 10_000.0,
        "rope.scaling.factor": 1,
        "rope.scaling.attn_factor": 1,
        "rope.scale_linear": 1,
        "expert_count": 0,
        "expert_used_count": 0,
        "attn_logit_softcapping": 50.0 if config.model_type == "gemma2" else None,
        "final_logit_softcapping": 30.0 if config.model_type == "gemma2" else None,
    }


def _scale_of_gemma(config: Any) -> float:
    """Number by whose root llama.cpp divides the attention scores of Gemma 2 and 3."""
    if config.num_hidden_layers == _LAYERS_OF_27B.get(config.model_type):
        return float(config.hidden_size / config.num_attention_heads)
    return float(head_dim(config))


def _of_all_layers(value: Any) -> Any:
    """The value that a list has for all layers; other values as they are."""
    is_one = isinstance(value, list) and len(value) > 0 and value.count(value[0]) == len(value)
    return value[0] if is_one else value


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal; numbers as float32 stores them."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)
