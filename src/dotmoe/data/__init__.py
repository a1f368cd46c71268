"""Text sources -> documents -> packed, resumable blocks of tokens."""

from dotmoe.data.blocks import TokenBlocks, block_writer, split_off_tail, write_decontaminated
from dotmoe.data.packing import Record, boundaries, pack, pack_sources, separator_of
from dotmoe.data.sources import SELF, Continuation, DataConfig, documents, sources_of

__all__ = [
    "SELF",
    "Continuation",
    "DataConfig",
    "Record",
    "TokenBlocks",
    "block_writer",
    "boundaries",
    "documents",
    "pack",
    "pack_sources",
    "separator_of",
    "sources_of",
    "split_off_tail",
    "write_decontaminated",
]
