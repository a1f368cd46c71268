"""The vocabulary of a tokenizer as GGUF lists it: a text and a type for every embedding row."""

import json
from dataclasses import dataclass
from typing import Any

from gguf import TokenType

from dotmoe.artifacts import DenseModel

PHI3_KEEP = {"<unk>", "<s>", "<|endoftext|>"}
"""Special tokens of Phi-3 that leave the spaces after them."""


class UnknownTokenizerError(Exception):
    """llama.cpp has no tokenizer that cuts text as this one does; the message says what differs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """A tokenizer taken apart."""

    parts: dict[str, Any]
    """Content of its tokenizer.json."""
    tokens: list[str]
    """Text of each id, as stored in its vocabulary."""
    types: list[TokenType]
    """Type of each id."""
    notes: list[str]
    """What llama.cpp has no place for, one sentence each."""

    @property
    def model(self) -> dict[str, Any]:
        """The merging model."""
        model: dict[str, Any] = self.parts["model"]
        return model

    @property
    def merges(self) -> list[tuple[str, str]]:
        """Pairs that are merged, first ones first."""
        merges = self.model.get("merges", [])
        pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges)
        return [(left, right) for left, right in pairs]

    @property
    def strips_as_phi3(self) -> bool:
        """Special tokens take the spaces after them by the one rule that llama.cpp has for it."""
        added = self.parts["added_tokens"]
        taking = {token["content"] for token in added if token["rstrip"]}
        others = any(token["lstrip"] or token["single_word"] for token in added)
        named = {token["content"] for token in added}
        return bool(taking) and not others and named - taking == PHI3_KEEP and "</s>" in taking

    @property
    def is_byte_level(self) -> bool:
        """Text becomes bytes first, and each byte a character."""
        return any(step["type"] == "ByteLevel" for step in steps(self.parts["pre_tokenizer"]))


def pieces_of(dense: DenseModel) -> Pieces:
    """Take apart the tokenizer of a dense model.

    Raises:
        UnknownTokenizerError: It is no BPE tokenizer, or two ids have the same text.
    """
    backend = getattr(dense.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnknownTokenizerError("it is not one of the tokenizers library")
    parts = json.loads(backend.to_str())
    model = parts["model"]
    if model["type"] != "BPE":
        raise UnknownTokenizerError(f"its model is {model['type']}, and only BPE is known")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise UnknownTokenizerError(f"its {key} is {model[key]!r}")
    rows = int(dense.config.vocab_size)
    tokens = [f"[PAD{number}]" for number in range(rows)]
    types = [TokenType.UNUSED] * rows
    for text, number in model["vocab"].items():
        tokens[number], types[number] = text, TokenType.NORMAL
    for added in parts["added_tokens"]:
        number = added["id"]
        tokens[number] = added["content"]
        types[number] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    if len(set(tokens)) < rows:
        raise UnknownTokenizerError("two of its ids have the same text")
    pieces = Pieces(parts=parts, tokens=tokens, types=types, notes=[])
    greedy = [t["content"] for t in parts["added_tokens"] if _takes_more_than_itself(t)]
    if greedy and not pieces.strips_as_phi3:
        pieces.notes.append(
            f"The token {greedy[0]!r} takes spaces beside it or whole words only, which llama.cpp "
            f"cannot express ({len(greedy)} such tokens)."
        )
    return pieces


def _takes_more_than_itself(added: dict[str, Any]) -> bool:
    return bool(added["lstrip"] or added["rstrip"] or added["single_word"])


def steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A normaliser or pre-tokenizer as a flat list."""
    if part is None:
        return []
    for key in ("pretokenizers", "normalizers"):
        if key in part:
            return [step for inner in part[key] for step in steps(inner)]
    return [part]
