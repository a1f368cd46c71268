"""The tokenizer inside a GGUF file, written only if llama.cpp then splits text in the same way.

`gpt2` is byte-level BPE with a named rule that splits text before merging. `llama` is SentencePiece
BPE: it joins the two neighbours whose union is the token with the highest score. That is merging in
order of rank if every way to write a token as a union of two others is a merge, and the merges of
one token are consecutive; both conditions are checked.
"""

import json
import re
import tomllib
from collections import Counter
from functools import cache
from itertools import groupby, product
from pathlib import Path
from typing import Any, Literal

from gguf import TokenType
from tokenizers import Regex, pre_tokenizers

from dotmoe.common.files import Values
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.tokenizer import random_text

_FILE = Path(__file__).with_name("gguf_tokenizer_rules.toml")
RULES: dict[str, dict[str, Any]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))
"""llama.cpp's rules that split text, by name; the file documents their entries."""
_NO_MERGES = ["<no> <merges>"]
"""llama.cpp requires at least one merge; this one never applies."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Character that represents a space in the tokens of SentencePiece."""
_PHI3_KEEP = {"<unk>", "<s>", "<|endoftext|>"}
"""Special tokens of Phi-3 that do not absorb the spaces after them."""


class UnknownTokenizerError(Exception):
    """llama.cpp has no tokenizer equivalent to this one; the message states the difference."""


def tokenizer_keys(
    dense: DenseModel, choice: Literal["auto", "none"], source: str
) -> tuple[Values, list[str]]:
    """Metadata keys of the tokenizer (`none` if llama.cpp has no equivalent), and notes for users.

    A file with tokenizer `none` takes token ids only. A tokenizer that splits text differently from
    the one used in training would be silently wrong, so an unknown one is never guessed.

    llama.cpp looks for `phi-3` in `general.name`, the last part of `source`. If it finds that,
    special tokens absorb the spaces after them; so the name has it if and only if they should.
    """
    name = re.sub("phi-?3", "Phi 3", Path(source).name, flags=re.IGNORECASE)
    notes = list[str]()
    backend = getattr(dense.tokenizer, "backend_tokenizer", None)
    parts = json.loads(backend.to_str()) if backend else {}
    try:
        keys = _keys_of(dense, backend, parts, choice, notes)
    except UnknownTokenizerError as reason:
        note = f"The file has no tokenizer ({reason}): llama.cpp takes token ids only."
        return {"general.name": name, "tokenizer.ggml.model": "none"}, [note]
    template = getattr(dense.tokenizer, "chat_template", None)
    template = template.get("default") if isinstance(template, dict) else template
    if isinstance(template, str):
        keys["tokenizer.chat_template"] = template
    added = parts["added_tokens"]
    greedy = [t["content"] for t in added if t["lstrip"] or t["rstrip"] or t["single_word"]]
    if "</s>" in greedy and {t["content"] for t in added if not t["rstrip"]} == _PHI3_KEEP:
        name += " (Phi-3 tokenizer)"
    elif greedy:
        notes.append(
            f"The token {greedy[0]!r} absorbs spaces beside it or matches whole words only, which "
            f"llama.cpp does not support ({len(greedy)} such tokens)."
        )
    return {"general.name": name, **keys}, notes


def _keys_of(
    dense: DenseModel, backend: Any, parts: Values, choice: str, notes: list[str]
) -> Values:
    """Keys of the vocabulary and the rules of a tokenizer; refused if llama.cpp has none alike."""
    if choice == "none":
        raise UnknownTokenizerError("--gguf-tokenizer is none")
    if not parts:
        raise UnknownTokenizerError("it is not from the tokenizers library")
    tokens, types = _vocabulary(parts, int(dense.config.vocab_size))
    if parts["model"].get("byte_fallback"):  # bytes without a token become <0x0A> etc.
        keys = _sentencepiece(parts, tokens, types, notes)
    else:
        keys = _byte_level(backend, parts, notes)
    return {
        **keys,
        **_special(dense, len(tokens)),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": list(map(int, types)),
    }


def tokenizer_name(keys: Values) -> str:
    """`gpt2`, `llama` or `none` (token ids only); after a slash, the rule that splits text."""
    model, pre = (keys.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    return f"{model}/{pre}" if pre else str(model)


def _vocabulary(parts: Values, rows: int) -> tuple[list[str], list[TokenType]]:
    """Text and type of the token of every embedding row."""
    model = parts["model"]
    if model["type"] != "BPE":
        raise UnknownTokenizerError(f"its model is {model['type']}, and only BPE is supported")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise UnknownTokenizerError(f"its {key} is {model[key]!r}")
    largest = max([*model["vocab"].values(), *(added["id"] for added in parts["added_tokens"])])
    if largest >= rows:
        raise UnknownTokenizerError(f"it has a token id {largest}, but the model has {rows} ids")
    tokens = [f"[PAD{number}]" for number in range(rows)]
    types = [TokenType.UNUSED] * rows
    for text, number in model["vocab"].items():
        tokens[number], types[number] = text, TokenType.NORMAL
    for added in parts["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    if len(set(tokens)) < rows:
        raise UnknownTokenizerError("two of its ids have the same text")
    return tokens, types


def _steps(part: Values | None) -> list[Values]:
    """A normaliser or pre-tokenizer as a flat list."""
    if part is None:
        return []
    inner = part.get("pretokenizers", part.get("normalizers"))
    return [part] if inner is None else [step for each in inner for step in _steps(each)]


def _special(dense: DenseModel, rows: int) -> Values:
    """Keys for the ids of special tokens, and for which of them are put around a text."""
    tokenizer = dense.tokenizer
    ids: dict[str, int] = {}
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token_id = getattr(tokenizer, f"{name}_token_id", None)
        if token_id is None:
            token_id = getattr(dense.config, f"{name}_token_id", None)
        if isinstance(token_id, int) and 0 <= token_id < rows:
            ids[key] = token_id
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a")["input_ids"])
    for adds_bos, adds_eos in product((False, True), repeat=2):
        before = [ids.get("bos")] if adds_bos else []
        after = [ids.get("eos")] if adds_eos else []
        if full == [*before, *bare, *after]:
            return {
                **{f"tokenizer.ggml.{key}_token_id": token_id for key, token_id in ids.items()},
                "tokenizer.ggml.add_bos_token": adds_bos,
                "tokenizer.ggml.add_eos_token": adds_eos,
            }
    raise UnknownTokenizerError(f"it makes {full}, which is not {bare} between bos and eos")


def _byte_level(backend: Any, parts: Values, notes: list[str]) -> Values:
    for step in _steps(parts["normalizer"]):
        if step["type"] != "NFC":
            raise UnknownTokenizerError(f"it first normalises text with {step['type']}")
        notes.append("The tokenizer normalises text to NFC, llama.cpp does not: give it NFC text.")
    missing = len(set(pre_tokenizers.ByteLevel.alphabet()) - parts["model"]["vocab"].keys())
    if missing:
        notes.append(f"The vocabulary lacks {missing} of 256 bytes: llama.cpp drops them.")
    merges = [" ".join(pair) for pair in parts["model"]["merges"]]
    takes_words = bool(parts["model"].get("ignore_merges", False))
    pre = _rule(backend.pre_tokenizer, takes_words) if merges else "gpt-2"
    if RULES[pre].get("approximate"):
        notes.append("llama.cpp recognises only ASCII capitals; it may split words differently.")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": merges or _NO_MERGES,
    }


def _rule(cutter: Any, takes_words: bool) -> str:
    """Name of the rule that splits a sample text exactly as the pre-tokenizer does."""
    pieces = None if cutter is None else cutter.pre_tokenize_str(random_text())
    for name, rule in RULES.items():
        if rule.get("whole_words", False) == takes_words and _cut_by(tuple(rule["cuts"])) == pieces:
            return name
    raise UnknownTokenizerError("no known rule of llama.cpp splits text in this way")


@cache
def _cut_by(patterns: tuple[str, ...]) -> list[Any]:
    steps: list[Any] = [pre_tokenizers.Split(Regex(each), "isolated") for each in patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return list(pre_tokenizers.Sequence(steps).pre_tokenize_str(random_text()))


def _sentencepiece(
    parts: Values, tokens: list[str], types: list[TokenType], notes: list[str]
) -> Values:
    """Keys of a SentencePiece tokenizer; sets the byte and unknown tokens in `types`."""
    model, vocabulary = parts["model"], parts["model"]["vocab"]
    for name in (f"<0x{byte:02X}>" for byte in range(256)):
        if name not in vocabulary:
            raise UnknownTokenizerError(f"the byte {name} is not in its vocabulary")
        types[vocabulary[name]] = TokenType.BYTE
    if model.get("unk_token") in vocabulary:
        types[vocabulary[model["unk_token"]]] = TokenType.UNKNOWN
    if model.get("ignore_merges"):
        raise UnknownTokenizerError("it does not split words that are tokens")
    prefix = _puts_space_first(parts)
    if prefix and parts["pre_tokenizer"]:
        notes.append(
            "llama.cpp, like SentencePiece, puts a space before every text; Transformers only "
            "before one that does not begin with a space."
        )
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": _scores(parts, tokens, types),
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def _puts_space_first(parts: Values) -> bool:
    """Whether a space is put before a text; refuses changes other than from spaces to `_SPACE`."""
    steps = [*_steps(parts["normalizer"]), *_steps(parts["pre_tokenizer"])]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    if steps in ([prepend, replace], [replace]):
        return steps[0] == prepend
    metaspace = {"type": "Metaspace", "replacement": _SPACE, "split": False}
    if len(steps) == 1 and metaspace.items() <= steps[0].items():
        return bool(steps[0].get("prepend_scheme") != "never")
    raise UnknownTokenizerError(f"it treats spaces by the rules {[each['type'] for each in steps]}")


def _scores(parts: Values, tokens: list[str], types: list[TokenType]) -> list[float]:
    """Score of each token: minus the rank of its first merge, lowest if no merge produces it."""
    merges = [(left, right) for left, right in parts["model"]["merges"]]
    merged = [left + right for left, right in merges]
    for token, runs in Counter(token for token, _ in groupby(merged)).items():
        if runs > 1:
            raise UnknownTokenizerError(f"the merges of {token!r} are not consecutive")
    rank_of = {token: rank for rank, token in reversed(list(enumerate(merged)))}
    vocabulary, merge_set = parts["model"]["vocab"], set(merges)
    for token, number in vocabulary.items():
        if types[number] != TokenType.NORMAL:
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        for left, right in pairs:
            if (left, right) not in merge_set and left in vocabulary and right in vocabulary:
                raise UnknownTokenizerError(f"{left!r} and {right!r} are not merged into {token!r}")
    return [
        -float(rank_of.get(text, len(merges))) if kind == TokenType.NORMAL else 0.0
        for text, kind in zip(tokens, types, strict=True)
    ]
