"""Options of exports."""

from dataclasses import dataclass
from typing import Annotated, Literal

from dotmoe.common.errors import UserError, nearest
from dotmoe.common.options import Shown, above, at_least, at_most

FORMAT_NAMES = (
    "glm4_moe",
    "mixtral",
    "qwen3_moe",
    "qwen3_5_moe_text",
    "granitemoe",
    "flex_olmo",
    "dotmoe",
)
"""Formats that Transformers loads, in order of preference; `dotmoe.export.architectures` has them.
"""
GGUF_DENSE = "gguf_dense"
GGUF_NAMES = ("gguf", "gguf_glm4moe", "gguf_llama", GGUF_DENSE)
"""`gguf` selects the first of the next two that can hold the model; `gguf_dense` is the dense model
itself, to measure beside it."""


def require_format(name: str) -> None:
    """Raise a `UserError` if there is no format of this name."""
    names = ("auto", *FORMAT_NAMES, *GGUF_NAMES)
    if name not in names:
        raise UserError(
            f"export format is {name!r}, which dotmoe cannot write. "
            f"Formats: {', '.join(names)}.{nearest(name, names)}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig:
    """Options of an export and its verification."""

    format: Annotated[str, Shown("FORMAT")] = "auto"
    """Stock architecture to write: glm4_moe, mixtral, qwen3_moe, qwen3_5_moe_text,
    granitemoe, flex_olmo, or auto: of those that hold the model the one with the longest context,
    of equal ones the first.
    Experts made of heads, and families whose decoder no stock MoE has, need format dotmoe, which
    Transformers and vLLM's Transformers backend run, with code that the export contains.
    From a finished run, `dotmoe export` also writes gguf, gguf_glm4moe, gguf_llama, and gguf_dense,
    the dense model itself."""
    export_dtype: Literal["source", "float32", "bfloat16"] = "source"
    """Dtype of the written weights. `source` keeps every dense tensor's own dtype, but writes
    float16 as float32, since float16 cannot hold scaled routers; bfloat16 rounds such weights."""
    max_shard_gib: Annotated[float, above(0), at_most(1e6)] = 4.0
    """Maximum size of a weight file, in GiB; writing takes as much memory."""
    scale_tokens: Annotated[int, at_least(1)] = 2048
    """Number of text tokens from which the router scales are chosen."""
    verify_tokens: Annotated[int, at_least(1)] = 512
    """Number of text tokens on which export and masked dense model are compared."""

    def check_together(self) -> None:
        """Refuse a format that does not exist, or that is written from a finished run only."""
        require_format(self.format)
        if self.format in GGUF_NAMES:
            raise UserError(
                f"export format {self.format} needs a finished run: convert to a Transformers "
                f"format first, then dotmoe export RUN OUT --format {self.format}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufConfig(ExportConfig):
    """Options of an export, including those of GGUF files."""

    gguf_type: Literal["f32", "f16", "bf16", "q8_0", "q4_0"] = "f16"
    """Number format of the weight matrices in a GGUF file."""
    gguf_tokenizer: Literal["auto", "none"] = "auto"
    """auto: store the model's tokenizer in the GGUF file; none: the file takes token ids only."""

    def check_together(self) -> None:
        """Refuse a format that does not exist."""
        require_format(self.format)
