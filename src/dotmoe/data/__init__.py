"""Text sources -> documents -> packed, resumable blocks of tokens."""

from dotmoe.data.blocks import TokenBlocks, pack_blocks
from dotmoe.data.packing import Packed, pack
from dotmoe.data.sources import Continuation, DataConfig, documents

__all__ = [
    "Continuation",
    "DataConfig",
    "Packed",
    "TokenBlocks",
    "documents",
    "pack",
    "pack_blocks",
]
