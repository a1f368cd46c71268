"""Text sources -> documents -> packed, resumable blocks of tokens."""

from dotmoe.data.blocks import BlockWriter, TokenBlocks, split_off_tail
from dotmoe.data.decontamination import write_decontaminated
from dotmoe.data.files import Continuation
from dotmoe.data.packing import PackedSources, pack, pack_sources, separator_of, shares_in_words
from dotmoe.data.sources import SELF, DataConfig, documents, sources_of

__all__ = [
    "SELF",
    "BlockWriter",
    "Continuation",
    "DataConfig",
    "PackedSources",
    "TokenBlocks",
    "documents",
    "pack",
    "pack_sources",
    "separator_of",
    "shares_in_words",
    "sources_of",
    "split_off_tail",
    "write_decontaminated",
]
