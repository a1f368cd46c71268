"""The tokenizer as llama.cpp keeps it: inside the file, and only if it cuts text the same way."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dotmoe.artifacts import DenseModel
from dotmoe.gguf_export.byte_level_bpe import byte_level_bpe
from dotmoe.gguf_export.pieces import Pieces, UnknownTokenizerError, pieces_of
from dotmoe.gguf_export.sentencepiece_bpe import (
    adds_space_always,
    is_sentencepiece,
    sentencepiece_bpe,
)

TokenizerChoice = Literal["auto", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerMetadata:
    """Keys of a GGUF that describe its tokenizer."""

    model: str
    """`gpt2` (byte-level BPE), `llama` (SentencePiece) or `none`: token ids only."""
    pre: str | None
    """Name of the rule by which `gpt2` cuts text before merging."""
    keys: dict[str, Any]
    """All keys, in full."""
    adds_space_always: bool = False
    """llama.cpp puts a space before every text; Transformers only where there is none."""
    strips_as_phi3: bool = False
    """Special tokens take the spaces after them, as those of Phi-3 do."""
    notes: list[str] = field(default_factory=list)
    """Where llama.cpp tokenises otherwise than Transformers, one sentence each."""


def tokenizer_metadata(dense: DenseModel, choice: TokenizerChoice) -> TokenizerMetadata:
    """The tokenizer of a dense model, or `none` and the reason where llama.cpp has no such one.

    A file with tokenizer `none` runs token ids; a tokenizer that cuts text into other tokens than
    the model was trained on would be silently wrong, so an unknown one is never guessed.
    """
    if choice == "none":
        return without_tokenizer("no tokenizer was asked for")
    try:
        pieces = pieces_of(dense)
        keys, notes = _special(dense, pieces)
        make = sentencepiece_bpe if is_sentencepiece(pieces) else byte_level_bpe
        form = make(pieces)
    except UnknownTokenizerError as reason:
        return without_tokenizer(str(reason))
    template = getattr(dense.tokenizer, "chat_template", None)
    if isinstance(template, str):
        keys["tokenizer.chat_template"] = template
    return TokenizerMetadata(
        model=form["tokenizer.ggml.model"],
        pre=form.get("tokenizer.ggml.pre"),
        keys={
            **form,
            "tokenizer.ggml.tokens": pieces.tokens,
            "tokenizer.ggml.token_type": [int(kind) for kind in pieces.types],
            **keys,
        },
        adds_space_always=adds_space_always(pieces),
        strips_as_phi3=pieces.strips_as_phi3,
        notes=[*pieces.notes, *notes],
    )


def without_tokenizer(reason: str) -> TokenizerMetadata:
    """Token ids only."""
    return TokenizerMetadata(
        model="none",
        pre=None,
        keys={"tokenizer.ggml.model": "none"},
        notes=[
            f"The file holds no tokenizer ({reason}): llama.cpp runs token ids only. Tokenise with "
            "the dense model's tokenizer."
        ],
    )


def _special(dense: DenseModel, pieces: Pieces) -> tuple[dict[str, Any], list[str]]:
    """Ids of special tokens, and which of them are put around a text."""
    tokenizer, config = dense.tokenizer, dense.config
    ids: dict[str, int] = {}
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token_id = getattr(tokenizer, f"{name}_token_id", None)
        if token_id is None:
            token_id = getattr(config, f"{name}_token_id", None)
        if isinstance(token_id, list):  # several ends of text; llama.cpp knows the others by name
            token_id = token_id[0] if token_id else None
        if token_id is not None and 0 <= token_id < len(pieces.tokens):
            ids[key] = int(token_id)
    before, after = _surroundings(tokenizer)
    notes = []
    if before not in ([], [ids.get("bos")]) or after not in ([], [ids.get("eos")]):
        raise UnknownTokenizerError(f"it puts tokens {before} before a text and {after} after it")
    keys = {f"tokenizer.ggml.{key}_token_id": token_id for key, token_id in ids.items()}
    if "bos" not in ids and pieces.is_byte_level:
        notes.append(
            "The tokenizer has no token for the beginning of a text. llama.cpp names one all the "
            "same (id 11), but never adds it."
        )
    return {
        **keys,
        "tokenizer.ggml.add_bos_token": bool(before),
        "tokenizer.ggml.add_eos_token": bool(after),
    }, notes


def _surroundings(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Tokens put before and after a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    raise UnknownTokenizerError("it changes a text when it adds special tokens")


def general_name(source: str, tokenizer: TokenizerMetadata) -> str:
    """`general.name` of a file: the last part of the model's name.

    llama.cpp looks for `phi-3` in it, and where it finds that treats spaces after special tokens as
    Phi-3's tokenizer does, so the name must say so if and only if the tokenizer does.
    """
    name = Path(source).name
    says_phi3 = re.search("phi-?3", name, re.IGNORECASE) is not None
    if tokenizer.strips_as_phi3 and not says_phi3:
        return f"{name} (Phi-3 tokenizer)"
    if says_phi3 and not tokenizer.strips_as_phi3:
        return re.sub("phi-?3", "Phi 3", name, flags=re.IGNORECASE)
    return re.sub("modern-bert", "modern bert", name, flags=re.IGNORECASE)
