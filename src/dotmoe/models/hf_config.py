"""What a Hugging Face config says of a decoder, whatever its family calls it."""

from typing import Any, NamedTuple

import torch
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from dotmoe.models.traits import Readout


def declared(config: Any, key: str, default: Any = None) -> Any:
    """Value of a key that the config's class declares; keys of other classes are ignored."""
    return getattr(config, key) if hasattr(type(config), key) else default


def state_ffn_width(config: Any) -> None:
    """Set `intermediate_size` to the width of the FFNs where a config states that otherwise."""
    if config.model_type == "granitemoehybrid":
        config.intermediate_size = config.shared_intermediate_size
    if declared(config, "block_auto_adjust_ff_dim"):  # LFM2 rounds two thirds of the stated width
        with torch.device("meta"):
            config.intermediate_size = Lfm2MLP(config).w1.out_features
        config.block_auto_adjust_ff_dim = False


def readout_of(config: Any) -> Readout:
    """How a model with this config makes logits."""
    factor = declared(config, "logit_scale", 1.0) / declared(config, "logits_scaling", 1.0)
    return Readout(float(factor), declared(config, "final_logit_softcapping"))


def rope_of(config: Any) -> dict[str, Any]:
    """Parameters of the rotary embeddings; those of full attention if kinds of layers differ."""
    rope: dict[str, Any] = config.rope_parameters
    return rope if "rope_type" in rope else rope["full_attention"]


def activation_name(config: Any) -> str:
    """Name of the activation function of a model's FFNs."""
    return str(declared(config, "hidden_activation") or declared(config, "hidden_act", "silu"))


def head_dim(config: Any) -> int:
    """Width of one attention head: stated in the config, else hidden_size / heads."""
    width = getattr(config, "head_dim", None)  # stock models read it even undeclared
    return int(width or config.hidden_size // config.num_attention_heads)


class Widths(NamedTuple):
    """Sizes of a dense model."""

    model: int
    ffn: int
    layers: int
    vocabulary: int
    context: int


def widths_of(config: Any) -> Widths:
    """The sizes in a Hugging Face config."""
    return Widths(
        model=config.hidden_size,
        ffn=config.intermediate_size,
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
    )
