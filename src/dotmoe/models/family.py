"""The contract of a model family, and the dict of all families."""

import difflib
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from transformers import CONFIG_MAPPING

from dotmoe.errors import UserError
from dotmoe.models.granite import Granite
from dotmoe.models.llama import Llama
from dotmoe.models.mistral import Mistral
from dotmoe.models.olmo2 import Olmo2
from dotmoe.models.phi3 import Phi3
from dotmoe.models.qwen2 import Qwen2
from dotmoe.models.qwen3 import Qwen3
from dotmoe.models.refusals import expert_count, unknown_type_reason
from dotmoe.models.traits import DecoderTraits, GatedFFN, TensorPart


class Family(Protocol):
    """Where the parts of a dense decoder live. Members are listed in `FAMILIES`."""

    model_type: str
    """`model_type` of the Hugging Face config."""

    def refusal(self, config: Any) -> str | None:
        """Why this config cannot be converted exactly (one sentence with the remedy), or None."""
        ...

    def traits(self, config: Any) -> DecoderTraits:
        """What an exporter must know of everything but the FFNs."""
        ...

    def layers(self, model: nn.Module) -> nn.ModuleList:
        """The decoder layers, in order; each has its FFN as `mlp`."""
        ...

    def ffn(self, layer: nn.Module) -> GatedFFN:
        """The three projections of one layer's FFN."""
        ...

    def trunk(self, model: nn.Module) -> nn.Module:
        """Everything below the head: token ids to the hidden states that the head reads."""
        ...

    def head(self, model: nn.Module) -> nn.Linear:
        """The output projection, without bias: logits = hidden @ weight.T."""
        ...

    def ffn_tensor(self, layer: int, projection: str) -> str:
        """Name of `gate`, `up` or `down` of a layer, in LLaMA's form."""
        ...

    def stored(self, config: Any, name: str) -> TensorPart:
        """Where the tensor of that name in LLaMA's form lies in a checkpoint of this family."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """Sizes of a dense model that decide how it can be split."""

    model: int
    ffn: int
    layers: int
    vocabulary: int
    context: int


FAMILIES: dict[str, Family] = {
    "llama": Llama(),
    "mistral": Mistral(),
    "qwen2": Qwen2(),
    "qwen3": Qwen3(),
    "granite": Granite(),
    "olmo2": Olmo2(),
    "phi3": Phi3(),
}


def family_of(config: Any) -> Family:
    """The family of a Hugging Face config.

    Raises:
        UserError: Unknown model type, or one that cannot be converted, with the reason.
    """
    model_type = config.model_type
    if model_type not in FAMILIES:
        reason = unknown_type_reason(config)
        raise UserError(
            f"model_type is {model_type!r}, which dotmoe cannot convert"
            f"{f': {reason}' if reason else ''}. Families: {', '.join(FAMILIES)}."
            f"{'' if reason else _nearest(model_type)}"
        )
    family = FAMILIES[model_type]
    experts = expert_count(config)
    if experts is not None:
        key, count = experts
        raise UserError(
            f"{key} is {count} in this {model_type} config, but only a dense model can be split, "
            "and this is a Mixture-of-Experts already. Choose a dense one."
        )
    reason = family.refusal(config)
    if reason is not None:
        raise UserError(reason)
    return family


def _nearest(model_type: str) -> str:
    if model_type in CONFIG_MAPPING:  # no slip of the pen: olmo3 is not meant to be olmo2
        return ""
    near = difflib.get_close_matches(model_type, FAMILIES, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def widths_of(config: Any) -> Widths:
    """Sizes read from a Hugging Face config."""
    return Widths(
        model=config.hidden_size,
        ffn=config.intermediate_size,
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
    )
