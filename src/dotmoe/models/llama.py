"""LLaMA 2, 3 and 3.x, and every checkpoint stored in their form."""

from typing import Any, cast

from torch import nn

from dotmoe.models.traits import DecoderTraits, GatedFFN, TensorPart


class Llama:
    """The plain pre-norm decoder; the other families differ from it in a line or two."""

    model_type = "llama"

    def refusal(self, config: Any) -> str | None:
        """See `Family.refusal`."""
        name = self.model_type
        if config.hidden_act not in ("silu", "swish"):
            return (
                f"hidden_act is {config.hidden_act!r} in this {name} config, but an FFN must be "
                "SiLU-gated (gate, up, down). Choose a SwiGLU model."
            )
        if getattr(config, "mlp_bias", False):
            return (
                f"mlp_bias is true in this {name} config, but no stock MoE architecture has biases "
                "inside its experts. Choose a model without them."
            )
        return None

    def traits(self, config: Any) -> DecoderTraits:
        """See `Family.traits`."""
        has_bias = bool(getattr(config, "attention_bias", False))
        return DecoderTraits(head_dim=head_dim(config), qkv_bias=has_bias, output_bias=has_bias)

    def layers(self, model: nn.Module) -> nn.ModuleList:
        """See `Family.layers`."""
        return cast(nn.ModuleList, model.get_submodule("model.layers"))

    def ffn(self, layer: nn.Module) -> GatedFFN:
        """See `Family.ffn`."""
        projections = [
            cast(nn.Linear, layer.get_submodule(f"mlp.{name}_proj"))
            for name in ("gate", "up", "down")
        ]
        return GatedFFN(*projections)

    def trunk(self, model: nn.Module) -> nn.Module:
        """See `Family.trunk`."""
        return model.get_submodule("model")

    def head(self, model: nn.Module) -> nn.Linear:
        """See `Family.head`."""
        return cast(nn.Linear, model.get_submodule("lm_head"))

    def ffn_tensor(self, layer: int, projection: str) -> str:
        """See `Family.ffn_tensor`."""
        return f"model.layers.{layer}.mlp.{projection}_proj.weight"

    def stored(self, config: Any, name: str) -> TensorPart:
        """See `Family.stored`."""
        return TensorPart(name)


def head_dim(config: Any) -> int:
    """Width of one attention head: stated in the config, else hidden_size / heads."""
    stated = getattr(config, "head_dim", None)
    return int(stated or config.hidden_size // config.num_attention_heads)
