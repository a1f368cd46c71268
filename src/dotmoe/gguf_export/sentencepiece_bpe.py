"""SentencePiece BPE with byte fallback (LLaMA 2's kind), from the merges of its tokenizer.json.

llama.cpp's `llama` tokenizer joins the two neighbours whose union is the token of highest score.
That is the same as merging in order of rank if every way to write a token as a union of two others
is a merge, and the merges of one token stand together; both are checked.
"""

from typing import Any

from gguf import TokenType

from dotmoe.gguf_export.pieces import Pieces, UnknownTokenizerError, steps

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Stands for a space inside tokens."""


def is_sentencepiece(pieces: Pieces) -> bool:
    """Whether a byte without a token of its own becomes one such as `<0x0A>`."""
    return bool(pieces.model.get("byte_fallback"))


def sentencepiece_bpe(pieces: Pieces) -> dict[str, Any]:
    """Keys of llama.cpp's `llama` tokenizer; marks the byte tokens and the unknown one.

    Raises:
        UnknownTokenizerError: llama.cpp would cut text otherwise.
    """
    vocabulary = pieces.model["vocab"]
    for byte in range(256):
        name = f"<0x{byte:02X}>"
        if name not in vocabulary:
            raise UnknownTokenizerError(f"the byte {name} is not in its vocabulary")
        pieces.types[vocabulary[name]] = TokenType.BYTE
    unknown = pieces.model.get("unk_token")
    if unknown in vocabulary:
        pieces.types[vocabulary[unknown]] = TokenType.UNKNOWN
    if pieces.model.get("ignore_merges"):
        raise UnknownTokenizerError("it takes words that are tokens whole")
    prefix = _puts_space_first(pieces)
    if adds_space_always(pieces):
        pieces.notes.append(
            "llama.cpp, like SentencePiece, puts a space before every text; Transformers only "
            "before one that does not begin with a space."
        )
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": _scores(pieces),
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def adds_space_always(pieces: Pieces) -> bool:
    """Whether llama.cpp puts a space before a text that begins with one, and Transformers does not.

    SentencePiece itself does; the Metaspace rule, to which Transformers turns its files, does not.
    """
    cuts = steps(pieces.parts["pre_tokenizer"])
    return is_sentencepiece(pieces) and bool(cuts) and _puts_space_first(pieces)


def _puts_space_first(pieces: Pieces) -> bool:
    """Whether a space is put before a text; spaces must become `SPACE`, and nothing else change."""
    normaliser = steps(pieces.parts["normalizer"])
    cuts = steps(pieces.parts["pre_tokenizer"])
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = {"type": "Prepend", "prepend": SPACE}
    if not cuts and normaliser in ([prepend, replace], [replace]):
        return normaliser[0] == prepend
    if not normaliser and len(cuts) == 1 and cuts[0]["type"] == "Metaspace":
        step = cuts[0]
        if step.get("replacement") == SPACE and not step.get("split", True):
            return bool(step.get("prepend_scheme") != "never")
    kinds = [step["type"] for step in (*normaliser, *cuts)]
    raise UnknownTokenizerError(f"it treats spaces by the rules {kinds}")


def _scores(pieces: Pieces) -> list[float]:
    """Minus the rank of a token's first merge; below all of them for tokens that none makes."""
    merges = pieces.merges
    rank_of: dict[str, int] = {}
    last = None
    for rank, pair in enumerate(merges):
        token = "".join(pair)
        if token in rank_of and token != last:
            raise UnknownTokenizerError(f"the merges of {token!r} do not stand together")
        rank_of.setdefault(token, rank)
        last = token
    vocabulary, known = pieces.model["vocab"], set(merges)
    for token, number in vocabulary.items():
        if pieces.types[number] != TokenType.NORMAL:
            continue
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            if pair not in known and all(side in vocabulary for side in pair):
                raise UnknownTokenizerError(
                    f"{pair[0]!r} and {pair[1]!r} are not merged into {token!r}"
                )
    return [
        -float(rank_of.get(text, len(merges))) if kind == TokenType.NORMAL else 0.0
        for text, kind in zip(pieces.tokens, pieces.types, strict=True)
    ]
