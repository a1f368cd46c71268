"""Rotary embeddings as llama.cpp computes them: order of entries, and scaled frequencies."""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_YARN_DEFAULTS = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": None,
    "mscale_all_dim": None,
    "truncate": True,
}


def pairwise_order(num_heads: int, head_dim: int) -> Int[Tensor, " R"]:
    """Rows of a query or key projection in the order that arch `llama` rotates them in.

    Transformers rotates entry i of a head with entry i + head_dim / 2; arch `llama` rotates
    neighbours. Row 2 i of the result is row i, and row 2 i + 1 is row i + head_dim / 2.

    Example:
        >>> pairwise_order(1, 6)
        tensor([0, 3, 1, 4, 2, 5])
    """
    rows = torch.arange(num_heads * head_dim).view(num_heads, 2, head_dim // 2)
    return rows.transpose(1, 2).flatten()


def frequency_factors(config: Any) -> tuple[Float[Tensor, " F"] | None, float]:
    """What arch `llama` divides the plain frequencies by, and multiplies sine and cosine by.

    Any static scaling (llama3, linear, yarn) is such a division, so one tensor states it exactly,
    from the frequencies that Transformers computes.

    Returns:
        Factors [head_dim / 2], float32, or None where nothing is scaled; and the factor of sine and
        cosine.
    """
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        return None, 1.0
    scaled, attention = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    exponents = torch.arange(len(scaled), dtype=torch.float64) / len(scaled)
    factors = float(rope["rope_theta"]) ** -exponents / scaled.double()
    return factors.float(), float(attention)


def scaling_keys(config: Any) -> dict[str, Any]:
    """Keys after `ARCH.rope.` for architectures that read scaling from metadata alone."""
    rope = config.rope_parameters
    kind = rope["rope_type"]
    if kind == "default":
        return {}
    factor = float(rope["factor"])
    keys: dict[str, Any] = {"scaling.type": kind, "scaling.factor": factor}
    if kind == "yarn":
        usual = 1 + 0.1 * math.log(factor)
        stated = rope.get("attention_factor")
        keys["scaling.original_context_length"] = int(rope["original_max_position_embeddings"])
        keys["scaling.attn_factor"] = 1.0 if stated is None else float(stated) / usual
    return keys


def scaling_refusal(config: Any, name: str) -> str | None:
    """Why `scaling_keys` cannot say how the model rotates (one sentence), or None.

    Args:
        config: Of the dense model.
        name: Format to name in the sentence.
    """
    rope = config.rope_parameters
    if rope["rope_type"] == "llama3":
        return (
            f"rope_type is 'llama3', but llama.cpp reads no frequency factors for {name} and would "
            "silently rotate wrongly. Choose --format gguf_llama, which takes no shared expert and "
            "no leading dense layers."
        )
    for key, usual in _YARN_DEFAULTS.items():
        if rope["rope_type"] == "yarn" and rope.get(key, usual) not in (None, usual):
            return (
                f"{key} of the yarn rotary embedding is {rope[key]}, but llama.cpp computes {name} "
                f"with {usual}. Choose --format gguf_llama."
            )
    return None
