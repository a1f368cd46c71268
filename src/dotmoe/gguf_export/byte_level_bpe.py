"""Byte-level BPE (GPT-2's kind): which of llama.cpp's rules cuts text as the tokenizer does."""

from typing import Any

from tokenizers import pre_tokenizers

from dotmoe.gguf_export.pieces import Pieces, UnknownTokenizerError, steps

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_WORDS}\p{{N}}{{1,3}}{_REST}"
QWEN2 = rf"{_WORDS}\p{{N}}{_REST}"

_Rule = tuple[tuple[str, ...], bool]

RULES: dict[_Rule, str] = {
    (("gpt2",), False): "gpt-2",
    (("digits", "gpt2"), False): "smollm",
    ((LLAMA3,), True): "llama-bpe",
    ((LLAMA3,), False): "dbrx",
    ((QWEN2,), False): "qwen2",
}
"""`tokenizer.ggml.pre` by how text is cut, and by whether a word that is a token is taken whole."""

_NO_MERGES = ["<no> <merges>"]
"""llama.cpp demands at least one merge; this one never applies."""


def byte_level_bpe(pieces: Pieces) -> dict[str, Any]:
    """Keys of llama.cpp's `gpt2` tokenizer.

    Raises:
        UnknownTokenizerError: llama.cpp has no rule that cuts text in the same way.
    """
    if not pieces.is_byte_level:
        raise UnknownTokenizerError("it works neither on bytes nor as SentencePiece does")
    vocabulary = pieces.model["vocab"]
    if any(sign not in vocabulary for sign in pre_tokenizers.ByteLevel.alphabet()):
        raise UnknownTokenizerError("some bytes are not in its vocabulary")
    _require_normaliser(pieces)
    merges = [" ".join(pair) for pair in pieces.merges]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _rule(pieces) if merges else "gpt-2",
        "tokenizer.ggml.merges": merges or _NO_MERGES,
    }


def _require_normaliser(pieces: Pieces) -> None:
    for step in steps(pieces.parts["normalizer"]):
        if step["type"] != "NFC":
            raise UnknownTokenizerError(f"it changes text by the rule {step['type']} first")
        pieces.notes.append(
            "The tokenizer composes Unicode characters (NFC) before it cuts text; llama.cpp does "
            "not, so give it composed text."
        )


def _rule(pieces: Pieces) -> str:
    cuts = tuple(cut for step in steps(pieces.parts["pre_tokenizer"]) for cut in _cut(step))
    rule = RULES.get((cuts, bool(pieces.model.get("ignore_merges", False))))
    if rule is None:
        raise UnknownTokenizerError(
            f"llama.cpp has no rule known here that cuts text by {list(cuts)}"
        )
    return rule


def _cut(step: dict[str, Any]) -> list[str]:
    """One pre-tokenizer step as an entry of a rule; none if it cuts nothing."""
    kind = step["type"]
    if kind == "ByteLevel":
        if step.get("add_prefix_space"):
            raise UnknownTokenizerError("it puts a space before a text")
        return ["gpt2"] if step.get("use_regex", True) else []
    if kind == "Digits" and step.get("individual_digits"):
        return ["digits"]
    # The known patterns match every character, so what lies between matches is empty: keeping the
    # matches alone is the same as cutting at them.
    ways = {("Isolated", False), ("Removed", True)}
    if kind == "Split" and (step.get("behavior"), bool(step.get("invert"))) in ways:
        pattern = step["pattern"]
        return [pattern["Regex"] if "Regex" in pattern else f"the text {pattern['String']!r}"]
    raise UnknownTokenizerError(f"it cuts text by the rule {kind}")
