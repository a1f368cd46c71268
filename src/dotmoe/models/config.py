"""Options of loading a dense model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from dotmoe.common.options import HOW, Shown

GGUF = ".gguf"

Sharding = Literal["auto", "replicate", "shard"]


def is_gguf(path: Path) -> bool:
    """Whether a path has the name of a GGUF file; the file need not exist."""
    return path.suffix.lower() == GGUF


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """Device, dtype and sharding of the dense model in memory."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights in memory. auto: the checkpoint's own on a GPU, but bfloat16 to convert
    a float16 one; float32 on a CPU, where 16-bit arithmetic is slow. The export's dtype is another
    option."""
    device: Annotated[str, Shown("DEVICE"), HOW] = "auto"
    """`cpu`, `cuda` or `cuda:N`. auto: the GPU if there is one, else the CPU."""
    sharding: Annotated[Sharding, HOW] = "auto"
    """Under torchrun: `replicate` gives every rank all weights, `shard` only its part (FSDP2).
    auto: shard if the weights would take more than half of a GPU's memory."""
