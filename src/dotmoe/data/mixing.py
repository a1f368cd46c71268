"""Many sources -> one file of blocks, with the share of each in the tokens."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dotmoe.data.blocks import (
    MORE_TEXT,
    BlockWriter,
    TokenBlocks,
    require_a_block,
    require_room_for_a_block,
)
from dotmoe.data.packing import Piece, end_of_document, separator, separator_of, tokenised
from dotmoe.data.sources import DataConfig, opened, sources_of

_TOLD_EVERY = 1 << 16

TextRecord = dict[str, Any]
"""What is written beside blocks about the text in them; see `pack_sources`."""


class PackedSources(NamedTuple):
    """Blocks on disk and where their tokens come from."""

    blocks: TokenBlocks
    record: TextRecord


class Reading:
    """A source under way: its pieces as token ids, and what was taken from it so far."""

    def __init__(self, name: str, weight: float | None, config: DataConfig, tokenizer: Any) -> None:
        self.name = name
        self.weight = weight
        self.num_tokens = 0
        self.num_documents = 0
        self.passes = 0
        self.ran_out = False
        self._config = config
        self._tokenizer = tokenizer
        self._stream = self._pieces()

    def next_piece(self) -> Piece | None:
        """The piece after the last; None when the source has been read as often as allowed."""
        piece = next(self._stream, None)
        self.ran_out = piece is None
        return piece

    def record(self, all_tokens: int) -> TextRecord:
        """What came of it."""
        return {
            "name": self.name,
            "weight": self.weight,
            "share": self.num_tokens / all_tokens,
            "tokens": self.num_tokens,
            "documents": self.num_documents,
            "passes": self.passes,
            "ran_out": self.ran_out,
        }

    def _pieces(self) -> Iterator[Piece]:
        # Read in order, sources are read once: alignment repeats the blocks themselves.
        allowed = 1 if self.weight is None else self._config.data_epochs
        while self.passes < allowed:
            texts = opened(self.name, self._config, self.passes)
            self.passes += 1
            for batch in tokenised(texts, self._tokenizer):
                yield from batch


def mixed(readings: Sequence[Reading], tokenizer: Any) -> Iterator[tuple[Reading, list[int]]]:
    """Token ids of piece after piece with their separators, and the source of each.

    With weights, the next piece is always of the source whose tokens, divided by its weight, are
    fewest. With w_i the weight of source i, s_i its longest piece and T tokens so far, its tokens
    are then between w_i T - w_i (s_1 + ... + s_n) and w_i T + s_i at every moment while no source
    has run out. A source that has run out leaves the others in their proportions. Without weights,
    one source is read after the other.

    A document of more than 64k characters comes in pieces; where those of another source come
    between, the rest of it counts as a document of its own.
    """
    waiting = list(readings)
    last: Reading | None = None
    while waiting:
        reading = min(waiting, key=lambda one: one.num_tokens / one.weight if one.weight else 0)
        piece = reading.next_piece()
        if piece is None:
            waiting.remove(reading)
            continue
        reading.num_documents += piece.is_start
        is_start = piece.is_start or last is not reading
        before = separator(tokenizer, has_previous=last is not None) if is_start else []
        last = reading
        reading.num_tokens += len(before) + len(piece.ids)
        yield reading, before + piece.ids
    if last is not None:
        end = end_of_document(tokenizer, has_previous=True)
        last.num_tokens += len(end)
        yield last, end


def pack_sources(
    config: DataConfig,
    tokenizer: Any,
    path: Path,
    max_tokens: int,
    on_progress: Callable[[int], None] = lambda done: None,
    remedy: str = MORE_TEXT,
) -> PackedSources:
    """Tokenise, mix, join and cut into blocks of `config.seq_len` tokens, straight to a file.

    Memory does not grow with the text. The same config and tokenizer give the same file.

    Args:
        config: Sources and their weights.
        tokenizer: A Hugging Face tokenizer.
        path: File to write; it has this name only when it is whole.
        max_tokens: Stop there, in the midst of a document if need be.
        on_progress: Told the number of tokens so far.
        remedy: What to do where there is too little text.

    Returns:
        The blocks, mapped from the file, and a record of the text: tokens, and for each source its
        weight, its share of the tokens, its documents, how often it was begun (`passes`), and
        whether it ran out.

    Raises:
        UserError: The text, or `max_tokens`, is shorter than one block; a source is refused.
    """
    name = ", ".join(config.data)
    require_room_for_a_block(config.seq_len, max_tokens, name, remedy)
    readings = [Reading(source, weight, config, tokenizer) for source, weight in sources_of(config)]
    told = 0
    with BlockWriter(path, config.seq_len) as writer:
        for reading, ids in mixed(readings, tokenizer):
            excess = max(0, writer.num_tokens + len(ids) - max_tokens)
            reading.num_tokens -= excess
            writer.append(ids[: len(ids) - excess])
            if writer.num_tokens - told >= _TOLD_EVERY or writer.num_tokens == max_tokens:
                told = writer.num_tokens
                on_progress(told)
            if writer.num_tokens == max_tokens:
                break
        require_a_block(writer.num_tokens, config.seq_len, name, remedy)
        writer.finish()
    record = {
        "tokens": writer.num_tokens,
        "seq_len": config.seq_len,
        "sources": [reading.record(writer.num_tokens) for reading in readings],
        "boundaries": boundaries(tokenizer),
    }
    return PackedSources(TokenBlocks.load(path), record)


def boundaries(tokenizer: Any) -> dict[str, str]:
    """What is done where documents meet, in words."""
    return {
        "separator": separator_of(tokenizer),
        "blocks": "cut at equal length: a document may begin in one and go on in the next",
        "attention": "causal over the whole block, across documents; not across blocks",
        "position_ids": "0 at the start of each block; they go on across documents",
        "loss": "on every token of a block but the first, separators too",
    }


def shares_in_words(record: TextRecord) -> str:
    """Which source gave how much, in one line."""
    return "; ".join(_share_in_words(source) for source in record["sources"])


def _share_in_words(source: TextRecord) -> str:
    words = f"{source['name']} {source['share']:.1%} of the tokens"
    if source["weight"] is not None:
        words += f" (asked {source['weight']:.1%})"
        if source["ran_out"]:
            words += f", ran out after {source['tokens']:,}"
    return words
