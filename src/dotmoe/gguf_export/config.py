"""What a user can choose of a GGUF export."""

from dataclasses import dataclass

from dotmoe.gguf_export.tokenizer import TokenizerChoice
from dotmoe.gguf_export.weight_types import WeightType

AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufConfig:
    """What is written, and how carefully it is checked."""

    format: str = AUTO
    """gguf_glm4moe, gguf_llama, or auto: the first of the two that can hold the model."""
    type: WeightType = "f32"
    """Number format of the matrices: f32, f16, bf16, q8_0 or q4_0."""
    tokenizer: TokenizerChoice = "auto"
    """auto: the dense model's, where llama.cpp has the like; none: token ids only."""
    scale_tokens: int = 2048
    """Tokens of text on which the routers are scaled and checked, at least 1."""
    verify_tokens: int = 512
    """Tokens of text on which llama.cpp is compared with Transformers, at least 1."""
