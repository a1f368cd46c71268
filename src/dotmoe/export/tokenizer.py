"""The tokenizer as llama.cpp keeps it: inside the file, and only if it cuts text the same way.

llama.cpp knows two kinds. `gpt2` is byte-level BPE, with a named rule that cuts text before
merging. `llama` is SentencePiece BPE: it joins the two neighbours whose union is the token of
highest score, which is merging in order of rank if every way to write a token as a union of two
others is a merge, and the merges of one token stand together; both are checked.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gguf import TokenType
from tokenizers import pre_tokenizers

from dotmoe.models.dense import DenseModel

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_WORDS}\p{{N}}{{1,3}}{_REST}"
QWEN2 = rf"{_WORDS}\p{{N}}{_REST}"

RULES: dict[tuple[tuple[str, ...], bool], str] = {
    (("gpt2",), False): "gpt-2",
    (("digits", "gpt2"), False): "smollm",
    ((LLAMA3,), True): "llama-bpe",
    ((LLAMA3,), False): "dbrx",
    ((QWEN2,), False): "qwen2",
}
"""`tokenizer.ggml.pre` by how text is cut, and by whether a word that is a token is taken whole."""

_NO_MERGES = ["<no> <merges>"]
"""llama.cpp demands at least one merge; this one never applies."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Stands for a space inside tokens of SentencePiece."""
_PHI3_KEEP = {"<unk>", "<s>", "<|endoftext|>"}
"""Special tokens of Phi-3 that leave the spaces after them."""


class UnknownTokenizerError(Exception):
    """llama.cpp has no tokenizer that cuts text as this one does; the message says what differs."""


@dataclass(kw_only=True, slots=True)
class TokenizerKeys:
    """Keys of a GGUF that describe its tokenizer."""

    keys: dict[str, Any]
    """All keys, in full."""
    adds_space_always: bool = False
    """llama.cpp puts a space before every text; Transformers only where there is none."""
    strips_as_phi3: bool = False
    """Special tokens take the spaces after them, as those of Phi-3 do."""
    notes: list[str] = field(default_factory=list)
    """Where llama.cpp tokenises otherwise than Transformers, one sentence each."""

    @property
    def name(self) -> str:
        """`gpt2`, `llama` or `none` (token ids only); after a slash the rule that cuts text."""
        pre = self.keys.get("tokenizer.ggml.pre")
        model: str = self.keys["tokenizer.ggml.model"]
        return f"{model}/{pre}" if pre else model


def tokenizer_keys(dense: DenseModel, choice: Literal["auto", "none"]) -> TokenizerKeys:
    """The tokenizer of a dense model, or `none` and the reason where llama.cpp has no such one.

    A file with tokenizer `none` runs token ids; a tokenizer that cuts text into other tokens than
    the model was trained on would be silently wrong, so an unknown one is never guessed.
    """
    try:
        if choice == "none":
            raise UnknownTokenizerError("no tokenizer was asked for")
        return _known(dense)
    except UnknownTokenizerError as reason:
        note = (
            f"The file holds no tokenizer ({reason}): llama.cpp runs token ids only. Tokenise with "
            "the dense model's tokenizer."
        )
        return TokenizerKeys(keys={"tokenizer.ggml.model": "none"}, notes=[note])


def general_name(source: str, tokenizer: TokenizerKeys) -> str:
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


def _known(dense: DenseModel) -> TokenizerKeys:
    backend = getattr(dense.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnknownTokenizerError("it is not one of the tokenizers library")
    parts = json.loads(backend.to_str())
    tokens, types = _vocabulary(parts, int(dense.config.vocab_size))
    made = TokenizerKeys(keys={}, strips_as_phi3=_strips_as_phi3(parts["added_tokens"]))
    greedy = [t["content"] for t in parts["added_tokens"] if _takes_more(t)]
    if greedy and not made.strips_as_phi3:
        made.notes.append(
            f"The token {greedy[0]!r} takes spaces beside it or whole words only, which llama.cpp "
            f"cannot express ({len(greedy)} such tokens)."
        )
    special = _special(dense, len(tokens))
    if parts["model"].get("byte_fallback"):  # a byte without a token of its own is one like <0x0A>
        _sentencepiece(parts, tokens, types, made)
    else:
        _byte_level(parts, made)
        if "tokenizer.ggml.bos_token_id" not in special:
            made.notes.append(
                "The tokenizer has no token for the beginning of a text. llama.cpp names one all "
                "the same (id 11), but never adds it."
            )
    made.keys["tokenizer.ggml.tokens"] = tokens
    made.keys["tokenizer.ggml.token_type"] = [int(kind) for kind in types]
    made.keys |= special
    template = getattr(dense.tokenizer, "chat_template", None)
    if isinstance(template, str):
        made.keys["tokenizer.chat_template"] = template
    return made


def _vocabulary(parts: dict[str, Any], rows: int) -> tuple[list[str], list[TokenType]]:
    """A text and a type for every row of the embedding."""
    model = parts["model"]
    if model["type"] != "BPE":
        raise UnknownTokenizerError(f"its model is {model['type']}, and only BPE is known")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise UnknownTokenizerError(f"its {key} is {model[key]!r}")
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
    return tokens, types


def _takes_more(added: dict[str, Any]) -> bool:
    return bool(added["lstrip"] or added["rstrip"] or added["single_word"])


def _strips_as_phi3(added: list[dict[str, Any]]) -> bool:
    taking = {token["content"] for token in added if token["rstrip"]}
    others = any(token["lstrip"] or token["single_word"] for token in added)
    leaving = {token["content"] for token in added} - taking
    return "</s>" in taking and not others and leaving == _PHI3_KEEP


def _merges(parts: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs that are merged, first ones first."""
    merges = parts["model"].get("merges", [])
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges)
    return [(left, right) for left, right in pairs]


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A normaliser or pre-tokenizer as a flat list."""
    if part is None:
        return []
    for key in ("pretokenizers", "normalizers"):
        if key in part:
            return [step for inner in part[key] for step in _steps(inner)]
    return [part]


def _special(dense: DenseModel, rows: int) -> dict[str, Any]:
    """Ids of special tokens, and which of them are put around a text."""
    tokenizer = dense.tokenizer
    ids: dict[str, int] = {}
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token_id = getattr(tokenizer, f"{name}_token_id", None)
        if token_id is None:
            token_id = getattr(dense.config, f"{name}_token_id", None)
        if isinstance(token_id, list):  # several ends of text; llama.cpp knows the others by name
            token_id = token_id[0] if token_id else None
        if token_id is not None and 0 <= token_id < rows:
            ids[key] = int(token_id)
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    places = range(len(full) - len(bare) + 1)
    start = next((at for at in places if full[at : at + len(bare)] == bare), None)
    if start is None:
        raise UnknownTokenizerError("it changes a text when it adds special tokens")
    before, after = full[:start], full[start + len(bare) :]
    if before not in ([], [ids.get("bos")]) or after not in ([], [ids.get("eos")]):
        raise UnknownTokenizerError(f"it puts tokens {before} before a text and {after} after it")
    return {
        **{f"tokenizer.ggml.{key}_token_id": token_id for key, token_id in ids.items()},
        "tokenizer.ggml.add_bos_token": bool(before),
        "tokenizer.ggml.add_eos_token": bool(after),
    }


# --- byte-level BPE ---------------------------------------------------------------------------


def _byte_level(parts: dict[str, Any], made: TokenizerKeys) -> None:
    cuts = _steps(parts["pre_tokenizer"])
    if not any(step["type"] == "ByteLevel" for step in cuts):
        raise UnknownTokenizerError("it works neither on bytes nor as SentencePiece does")
    vocabulary = parts["model"]["vocab"]
    if any(sign not in vocabulary for sign in pre_tokenizers.ByteLevel.alphabet()):
        raise UnknownTokenizerError("some bytes are not in its vocabulary")
    for step in _steps(parts["normalizer"]):
        if step["type"] != "NFC":
            raise UnknownTokenizerError(f"it changes text by the rule {step['type']} first")
        made.notes.append(
            "The tokenizer composes Unicode characters (NFC) before it cuts text; llama.cpp does "
            "not, so give it composed text."
        )
    merges, pre = [" ".join(pair) for pair in _merges(parts)], "gpt-2"
    if merges:
        cut_by = tuple(cut for step in cuts for cut in _cut(step))
        rule = RULES.get((cut_by, bool(parts["model"].get("ignore_merges", False))))
        if rule is None:
            raise UnknownTokenizerError(
                f"llama.cpp has no rule known here that cuts text by {list(cut_by)}"
            )
        pre = rule
    made.keys |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": merges or _NO_MERGES,
    }


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


# --- SentencePiece BPE ------------------------------------------------------------------------


def _sentencepiece(
    parts: dict[str, Any], tokens: list[str], types: list[TokenType], made: TokenizerKeys
) -> None:
    """Fills the keys; marks the byte tokens and the unknown one among the types."""
    vocabulary = parts["model"]["vocab"]
    for byte in range(256):
        name = f"<0x{byte:02X}>"
        if name not in vocabulary:
            raise UnknownTokenizerError(f"the byte {name} is not in its vocabulary")
        types[vocabulary[name]] = TokenType.BYTE
    unknown = parts["model"].get("unk_token")
    if unknown in vocabulary:
        types[vocabulary[unknown]] = TokenType.UNKNOWN
    if parts["model"].get("ignore_merges"):
        raise UnknownTokenizerError("it takes words that are tokens whole")
    prefix = _puts_space_first(parts)
    # SentencePiece puts one before every text; the Metaspace rule, to which Transformers turns its
    # files, only before one that does not begin with a space.
    made.adds_space_always = prefix and bool(_steps(parts["pre_tokenizer"]))
    if made.adds_space_always:
        made.notes.append(
            "llama.cpp, like SentencePiece, puts a space before every text; Transformers only "
            "before one that does not begin with a space."
        )
    made.keys |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": _scores(parts, tokens, types),
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def _puts_space_first(parts: dict[str, Any]) -> bool:
    """Whether a space is put before a text; spaces must become `_SPACE`, nothing else change."""
    normaliser, cuts = _steps(parts["normalizer"]), _steps(parts["pre_tokenizer"])
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    if not cuts and normaliser in ([prepend, replace], [replace]):
        return bool(normaliser[0] == prepend)
    if not normaliser and len(cuts) == 1 and cuts[0]["type"] == "Metaspace":
        step = cuts[0]
        if step.get("replacement") == _SPACE and not step.get("split", True):
            return bool(step.get("prepend_scheme") != "never")
    kinds = [step["type"] for step in (*normaliser, *cuts)]
    raise UnknownTokenizerError(f"it treats spaces by the rules {kinds}")


def _scores(parts: dict[str, Any], tokens: list[str], types: list[TokenType]) -> list[float]:
    """Minus the rank of a token's first merge; below all of them for tokens that none makes."""
    merges = _merges(parts)
    rank_of: dict[str, int] = {}
    last = None
    for rank, pair in enumerate(merges):
        token = "".join(pair)
        if token in rank_of and token != last:
            raise UnknownTokenizerError(f"the merges of {token!r} do not stand together")
        rank_of.setdefault(token, rank)
        last = token
    vocabulary, known = parts["model"]["vocab"], set(merges)
    for token, number in vocabulary.items():
        if types[number] != TokenType.NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if (left, right) not in known and left in vocabulary and right in vocabulary:
                raise UnknownTokenizerError(f"{left!r} and {right!r} are not merged into {token!r}")
    return [
        -float(rank_of.get(text, len(merges))) if kind == TokenType.NORMAL else 0.0
        for text, kind in zip(tokens, types, strict=True)
    ]
