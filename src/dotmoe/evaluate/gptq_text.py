"""The text of a perplexity as the quantisation literature (GPTQ and after it) joins it."""

from collections.abc import Iterable
from typing import Any

import torch

from dotmoe.data import Packed
from dotmoe.errors import UserError


def gptq_packed(pieces: Iterable[str], tokenizer: Any, max_tokens: int | None) -> Packed:
    r"""Tokens of `"\n\n".join(lines)`, tokenised whole with the tokenizer's own special tokens.

    A line keeps its line end, and a blank one is empty: these are the rows of the data set
    `wikitext-2-raw-v1`, which that literature joins, made again from the file they were cut from.

    Args:
        pieces: The text, as `dotmoe.data.documents` streams it; several files are put end to end.
        tokenizer: A Hugging Face tokenizer.
        max_tokens: Keep no more than these.

    Raises:
        UserError: There is no text.
    """
    text = "".join(pieces)
    lines = text.removesuffix("\n").split("\n")
    joined = "\n\n".join(line + "\n" if line.strip() else "" for line in lines)
    ids = tokenizer(joined, verbose=False).input_ids
    if not ids or not text:
        raise UserError("the data holds no text. Name sources with text in them.")
    per_byte = len(ids) / len(text.encode())
    return Packed(torch.tensor(ids[:max_tokens], dtype=torch.int32), per_byte)
