"""Text sources -> documents -> packed, resumable blocks of tokens."""

from dotmoe.data.blocks import BlockWriter, TokenBlocks, split_off_tail
from dotmoe.data.decontamination import write_decontaminated
from dotmoe.data.mixing import PackedSources, TextRecord, boundaries, pack_sources, shares_in_words
from dotmoe.data.packing import Packed, pack
from dotmoe.data.sources import SELF, Continuation, DataConfig, documents, sources_of

__all__ = [
    "SELF",
    "BlockWriter",
    "Continuation",
    "DataConfig",
    "Packed",
    "PackedSources",
    "TextRecord",
    "TokenBlocks",
    "boundaries",
    "documents",
    "pack",
    "pack_sources",
    "shares_in_words",
    "sources_of",
    "split_off_tail",
    "write_decontaminated",
]
