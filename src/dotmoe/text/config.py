"""Options of the text."""

from dataclasses import dataclass
from typing import Annotated

from dotmoe.common.errors import UserError
from dotmoe.common.options import Shown, above, at_least

SELF, PROMPTS = "self", "prompts"
"""Sources that ask: user's turns that the model writes itself, and the prompts of this package."""


def asks(source: str) -> bool:
    """Whether a source asks the dense model to write; a folder of that name is `./NAME`."""
    return source in (SELF, PROMPTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswersConfig:
    """Text that the dense model writes: answers to fit to, and held-out answers to measure on."""

    answer_tokens: Annotated[int | None, at_least(1)] = None
    """Tokens of the model's own answers, questions included, where the data ask for them. Default:
    as many as the fit reads."""
    heldout_answers: Annotated[int, at_least(0)] = 24
    """Held-out answers of a chat model to measure on: so many to prompts of the kinds that a fit
    reads, and as many to prompts of other kinds. 0: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Text to train or calibrate on."""

    data: Annotated[tuple[str, ...], Shown("SOURCE")] = ()
    """Sources of text, read in this order: .txt or .md files (one document per file), .json, .jsonl
    or .parquet files (one document per row), all but the last also as .gz, .zst or .bz2; folders of
    such files; folders written by `save_to_disk`; `python-stdlib` (the source files of
    this Python's standard library) or `python-stdlib-heldout` (the sixteenth of them that is held
    out); data sets of the `datasets` library, streamed (`allenai/c4:en`: the configuration follows
    the colon); `dolmino` (the paper's mix, from the hub). The model answers `prompts` (300
    of this package), `self` (the user's turns are its own too; a base model continues from
    nothing), and rows of local files that ask: a chat that ends with the user's turn, or a field
    `prompt`. Default: prompts and self, for a base model self alone; a finetuning reads what
    its run read.
    `SOURCE@SPLIT#FIELD` sets the split of a `datasets` source or folder (train) and the field of a
    row that holds the text, or a chat as a list of messages (the first of text, content, page,
    passage, document, messages, conversations that says something; else instruction and output)."""
    data_weights: tuple[Annotated[float, above(0)], ...] = ()
    """Mix the sources in these proportions of the tokens: one weight per source, with any sum. A
    source that runs out is not repeated; the others continue in their proportions. Default: read
    one source after the other."""
    shuffle_buffer: Annotated[int | None, at_least(0)] = None
    """Size in documents of the shuffle buffer of each source that `datasets` reads; 0 keeps its own
    order. A buffer also shuffles the order of its files. Default: 10000 for `dolmino`, else 0."""
    data_seed: Annotated[int, at_least(0)] = 0
    """Seed of the text: of own answers, which runs with another `seed` share, and of the shuffle
    buffer."""
    seq_len: Annotated[int, at_least(2)] = 2048
    """Tokens per block, 2 or more. Paper: 2048. Lowered to the model's context if that is less."""

    def check_together(self) -> None:
        """Refuse another number of weights than of sources."""
        if self.data_weights and len(self.data_weights) != len(self.data):
            named = ", ".join(self.data) or "none"
            raise UserError(
                f"data_weights has {len(self.data_weights)} numbers, but data has "
                f"{len(self.data)} sources ({named}). Give one for each source."
            )
