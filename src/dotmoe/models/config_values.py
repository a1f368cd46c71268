"""Values of a config.json that Transformers would ignore, or fail on with a traceback."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dotmoe.common.errors import UserError
from dotmoe.common.files import Values
from dotmoe.models.hf_config import head_dim, rope_of

ROPE_TYPES = {"default", *ROPE_INIT_FUNCTIONS}
_NAMES = {"rope_type", "type"}
_LISTS = {"short_factor", "long_factor", "mrope_section"}
_NUMBERS = {
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "low_freq_factor",
    "high_freq_factor",
    "max_position_embeddings",
    "alpha",
}
_MAY_BE_ZERO = {"llama_4_scaling_beta", "mscale", "mscale_all_dim"}
_WITH_DEFAULT = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "short_mscale",
    "long_mscale",
    *_MAY_BE_ZERO,
}
"""Numbers that may be null: Transformers has defaults."""
_FLAGS = {"truncate", "finetuned", "mrope_interleaved"}
_ONLY_NULL: tuple[Any, ...] = (None,)
_ONLY_ONE: tuple[Any, ...] = (None, 1)
_ONLY_ON: tuple[Any, ...] = (None, True)
_ONLY_OFF: tuple[Any, ...] = (None, False, 0, "", [])
UNREAD = {
    "embedding_multiplier": _ONLY_ONE,
    "residual_multiplier": _ONLY_ONE,
    "scale_emb": _ONLY_ONE,
    "logits_scaling": _ONLY_ONE,
    "logit_scale": _ONLY_ONE,
    "lm_head_multiplier": _ONLY_ONE,
    "rotary_pct": _ONLY_ONE,
    "rotary_percent": _ONLY_ONE,
    "attention_multiplier": _ONLY_NULL,
    "query_pre_attn_scalar": _ONLY_NULL,
    "clip_qkv": _ONLY_NULL,
    "attn_logit_softcapping": _ONLY_OFF,
    "final_logit_softcapping": _ONLY_OFF,
    "use_qk_norm": _ONLY_OFF,
    "qk_layernorm": _ONLY_OFF,
    "qk_norm": _ONLY_OFF,
    "parallel_attn": _ONLY_OFF,
    "use_parallel_residual": _ONLY_OFF,
    "alibi": _ONLY_OFF,
    "use_alibi": _ONLY_OFF,
    "use_mrope": _ONLY_OFF,
    "rope_interleaved": _ONLY_OFF,
    "no_rope_layers": _ONLY_OFF,
    "is_causal": _ONLY_ON,
}
"""Keys that change what a decoder computes where its class reads them, and values that do not."""
_NORM_EPS = ("norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rms_norm_epsilon")


def require_rope_numbers(plain: Values, path: Path) -> None:
    """Refuse rotary embeddings whose values are not numbers, or that are of no stated type."""
    if "rope_theta" in plain and plain.get("rope_parameters") is None:
        _require_value("rope_theta", plain["rope_theta"], "rope_theta", path)
    for name, rope in _ropes(plain, path):
        kinds = {str(rope[key]) for key in _NAMES if rope.get(key) is not None}
        if not kinds and rope.keys() - {"rope_theta", "partial_rotary_factor", *_NAMES}:
            raise UserError(
                f"{name} in {path} is {dict(rope)!r}, without a rope_type, so it has no effect. "
                f"Name one of {', '.join(sorted(ROPE_TYPES))}, or delete {name}."
            )
        _require_no_factor(kinds, rope, name, path)
        if len(kinds) > 1 and kinds != {"mrope", "default"}:
            raise UserError(
                f"{name} in {path} has two types, {' and '.join(sorted(kinds))}. Keep rope_type."
            )
        for key, value in rope.items():
            if key not in _NAMES:
                _require_value(key, value, f"{name}.{key}", path)
        low = rope.get("low_freq_factor", 0)
        high = rope.get("high_freq_factor", math.inf)
        if low >= high:
            raise UserError(
                f"{name}.low_freq_factor in {path} is {low}, but it must be below "
                f"high_freq_factor ({high}). Compare it with the original's."
            )


def _ropes(plain: Values, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Rotary embeddings in a config, by name: those of kinds of layers one by one."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = plain.get(key)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise UserError(
                f"{key} in {path} is {rope!r}, not an object. Compare it with the original's."
            )
        of_kinds = {kind: each for kind, each in rope.items() if isinstance(each, Mapping)}
        if of_kinds:
            yield from ((f"{key}.{kind}", each) for kind, each in of_kinds.items())
        else:
            yield key, rope


def _require_no_factor(kinds: set[str], rope: Mapping[str, Any], name: str, path: Path) -> None:
    """Refuse a factor of the plain rotation, which has none."""
    if kinds == {"default"} and rope.get("factor", 1) not in (None, 1):
        raise UserError(
            f"{name}.factor in {path} is {rope['factor']!r}, but rope_type default has no factor. "
            "Name the type that the model was trained with, or delete the factor."
        )


def require_one_rope(plain: Values, path: Path) -> None:
    """Refuse values of rotary embeddings under an older key that the newer key has otherwise."""
    new, old = plain.get("rope_parameters"), plain.get("rope_scaling")
    if not isinstance(new, Mapping):
        return
    older = {"type" if key in _NAMES else key: value for key, value in dict(old or {}).items()}
    if plain.get("rope_theta") is not None:
        older["rope_theta"] = plain["rope_theta"]
    newer = {"type" if key in _NAMES else key: value for key, value in new.items()}
    for key, value in older.items():
        if key in newer and newer[key] != value:
            raise UserError(
                f"{path} has {key} {newer[key]!r} in rope_parameters, but {value!r} in "
                "rope_scaling or beside it. Keep the one that the model was trained with."
            )


def _require_value(key: str, value: Any, name: str, path: Path) -> None:
    """Refuse a value of rotary embeddings that is not of its kind."""
    if key in _FLAGS or (key in _WITH_DEFAULT and value is None):
        return
    remedy = "Compare it with the original's."
    if key in _LISTS:
        if not isinstance(value, list) or not value or not all(map(_is_number, value)):
            raise UserError(f"{name} in {path} is {value!r}, but it must list numbers. {remedy}")
    elif key not in _NUMBERS | _WITH_DEFAULT:
        raise UserError(
            f"{name} in {path} is {value!r}, but Transformers does not read it. Delete it if the "
            "model was not trained with it."
        )
    elif not _is_number(value) or (value == 0 and key not in _MAY_BE_ZERO):
        raise UserError(f"{name} in {path} is {value!r}, but it must be a number above 0. {remedy}")


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number from 0 on."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < math.inf


def require_known_rope(config: Any, path: Path) -> None:
    """Refuse a type of rotary embeddings that Transformers does not have."""
    if not getattr(config, "rope_parameters", None):
        return
    # A class that reads kinds of layers has nothing beside them; others get their defaults there.
    nested = [key for key, value in config.rope_parameters.items() if isinstance(value, Mapping)]
    if nested and len(nested) < len(config.rope_parameters):
        raise UserError(
            f"rope_parameters in {path} is for kinds of layers ({', '.join(nested)}), and "
            f"{config.model_type} in Transformers has one rotation. Write its values without kinds."
        )
    kind = str(rope_of(config).get("rope_type"))
    if kind not in ROPE_TYPES:
        remedy = "Compare it with the original's."
        if kind == "mrope":
            remedy = "For text alone mrope is the plain rotation: set rope_type to default."
        raise UserError(
            f"the rope_type in {path} is {kind!r}, but {config.model_type} in Transformers has "
            f"{', '.join(sorted(ROPE_TYPES))}. {remedy}"
        )


def require_read(plain: Values, config: Any, rotated: float, path: Path) -> None:
    """Refuse values that change what a decoder computes, but that its class does not read.

    `rotated` is the share of each head that the model's rotary embeddings rotate.
    """
    cls = type(config)

    def is_read(key: str) -> bool:
        return hasattr(cls, key) or key in cls.attribute_map

    ignored = {
        key: plain[key]
        for key, harmless in UNREAD.items()
        if key in plain and not is_read(key) and plain[key] not in harmless
    }
    for key in _NORM_EPS:
        own = getattr(config, "rms_norm_eps", None)
        if key in plain and not is_read(key) and plain[key] != own:
            ignored[key] = plain[key]
    kinds = plain.get("layer_types")
    if kinds and not is_read("layer_types") and set(kinds) != {"full_attention"}:
        ignored["layer_types"] = sorted(set(kinds))
    window = plain.get("sliding_window")
    has_window = isinstance(window, int) and plain.get("use_sliding_window") is not False
    if has_window and not is_read("sliding_window") and window < config.max_position_embeddings:
        ignored["sliding_window"] = window
    share = plain.get("partial_rotary_factor")
    if isinstance(share, int | float) and abs(share - rotated) > 0.01:
        ignored["partial_rotary_factor"] = share
    _require_factors(config, rotated, path)
    if ignored:
        key, value = next(iter(ignored.items()))
        raise UserError(
            f"{key} in {path} is {value!r}, but {config.model_type} in Transformers does not read "
            "it. Delete it if the model was not trained with it, or correct model_type."
        )


def _require_factors(config: Any, rotated: float, path: Path) -> None:
    """Refuse lists of factors that are not one for each rotated pair: torch would stretch one."""
    pairs = int(head_dim(config) * rotated) // 2
    for key in ("short_factor", "long_factor"):
        factors = rope_of(config).get(key)
        if factors is not None and len(factors) != pairs:
            raise UserError(
                f"{key} in {path} has {len(factors)} numbers, but a head has {pairs} rotated "
                "pairs. Compare it with the original's."
            )


def require_context(config: Any, path: Path) -> None:
    """Refuse a context without room for a token and the next."""
    context = getattr(config, "max_position_embeddings", None)
    if isinstance(context, int) and context < 2:
        raise UserError(
            f"max_position_embeddings in {path} is {context}, but a context has 2 tokens or more. "
            "Compare it with the original's."
        )
