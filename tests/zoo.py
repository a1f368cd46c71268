"""Tiny stand-ins for published tokenizers: their structure and files, with a vocabulary of our own.

`write_tokenizer(folder, kind)` writes `tokenizer.json` and `tokenizer_config.json` as the models of
that kind have them on the hub: normaliser, pre-tokenizer, post-processor, decoder, added tokens and
class. The vocabulary has the 256 bytes, and words on which a wrong pre-tokenizer shows.
"""

import json
from dataclasses import dataclass, field

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _GPT4.replace("{1,3}", "")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
# Merges, in order; `_` stands for a space, `~` for a line end.
_MERGES = "_ _|__ __|~ ~|~ __|1 2|12 3|123 4|_ 1|t h|th e|_ the|i n|_ in|o n|_ on|e r|' s|) ~|' S"


def _split(pattern):
    each = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [each, _BYTES | {"use_regex": False}]


@dataclass(frozen=True)
class Kind:
    """What the files of a kind of tokenizer say."""

    tokenizer_class: str
    cuts: list = field(default_factory=list)  # none: SentencePiece with byte fallback
    bos: str | None = None
    eos: str = "<|endoftext|>"
    adds_bos: bool = False  # by the post-processor
    more: tuple = ()  # further special tokens
    metaspace: bool = False  # a pre-tokenizer instead of the normaliser
    config: dict = field(default_factory=dict)  # further entries of tokenizer_config.json
    nfc: bool = False


_LLAMA = {"bos": "<s>", "eos": "</s>", "adds_bos": True}
_NO_EOS = {"add_bos_token": True, "add_eos_token": False}
_DEEPSEEK = {"bos": "<｜begin▁of▁sentence｜>", "eos": "<｜end▁of▁sentence｜>", "adds_bos": True}  # noqa: RUF001
_DEEPSEEK |= {"config": _NO_EOS | {"legacy": True}}
_LLAMA3 = {"bos": "<|begin_of_text|>", "adds_bos": True, "more": ("<|eot_id|>",)}
_IM = ("<|im_start|>", "<|im_end|>")
_CHAT = {"additional_special_tokens": list(_IM)}
KINDS = {
    "llama2": Kind("LlamaTokenizer", **_LLAMA, config=_NO_EOS | {"legacy": False}),
    "codellama": Kind(
        "CodeLlamaTokenizer",
        **_LLAMA,
        more=tuple(f"{_SPACE}<{part}>" for part in ("PRE", "MID", "SUF", "EOT")),
        config=_NO_EOS | {"legacy": None},
    ),
    "mistral3": Kind(
        "LlamaTokenizer", **_LLAMA, metaspace=True, more=("[INST]",), config={"legacy": False}
    ),
    "yi": Kind(
        "LlamaTokenizer",
        bos="<|startoftext|>",
        more=_IM,
        config={"add_bos_token": False, "add_eos_token": False, "legacy": True},
    ),
    "phi3": Kind(
        "LlamaTokenizer",
        bos="<s>",
        more=("<|end|>", "<|user|>"),
        config={"add_bos_token": False, "add_eos_token": False, "legacy": False},
    ),
    "llama3": Kind("PreTrainedTokenizerFast", _split(_GPT4), eos="<|end_of_text|>", **_LLAMA3),
    "r1_llama": Kind("LlamaTokenizerFast", _split(_GPT4), **_DEEPSEEK),
    "r1_qwen": Kind("LlamaTokenizerFast", _split(_QWEN), **_DEEPSEEK),
    "qwen2": Kind(
        "Qwen2Tokenizer", _split(_QWEN), nfc=True, more=_IM, config=_CHAT | {"add_bos_token": False}
    ),
    "smollm2": Kind(
        "GPT2Tokenizer", [_DIGITS, _BYTES], bos="<|endoftext|>", more=_IM, config=_CHAT
    ),
    "granite3": Kind("GPT2Tokenizer", [_DIGITS, _BYTES], bos="<|endoftext|>"),
    "olmo2": Kind("GPT2Tokenizer", _split(_GPT4), more=("<|pad|>",)),
    "phi4": Kind("GPT2Tokenizer", _split(_GPT4), bos="<|endoftext|>", more=_IM),
    "nemo": Kind("PreTrainedTokenizerFast", _split(_TEKKEN), **_LLAMA, config=_NO_EOS),
    "falcon3": Kind("PreTrainedTokenizerFast", [_DIGITS, _BYTES], more=("<|pad|>",)),
}
"""Tokenizers by the family that first had them. Class and structure are those on the hub, as far as
copies of their files were seen; the split of falcon3 is simplified."""


def write_tokenizer(folder, kind, **config):
    """Write the two files of a `KINDS` entry; `config` changes tokenizer_config.json.

    Returns the number of token ids; each is below it.
    """
    it = KINDS[kind]
    special = list(dict.fromkeys([it.bos or it.eos, it.eos, *it.more]))
    if not it.cuts:
        special.insert(0, "<unk>")
    letters = [_byte(value, bool(it.cuts)) for value in range(256)]
    if not it.cuts:
        letters += [_SPACE, *map(chr, range(33, 127))]
    merges = [[_word(part, bool(it.cuts)) for part in pair.split(" ")] for pair in _merges(it)]
    tokens = list(dict.fromkeys([*special, *letters, *(left + right for left, right in merges)]))
    ids = {token: number for number, token in enumerate(tokens)}
    parts = _byte_level(it) if it.cuts else _sentencepiece(it)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    parts |= {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": ids[token], "content": token, **flags, "special": True} for token in special
        ],
    }
    if it.adds_bos:
        text = {"Sequence": {"id": "A", "type_id": 0}}
        begin = {"SpecialToken": {"id": it.bos, "type_id": 0}}
        parts["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text, begin, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {it.bos: {"id": it.bos, "ids": [ids[it.bos]], "tokens": [it.bos]}},
        }
    parts["model"] |= {"type": "BPE", "vocab": ids, "merges": [" ".join(pair) for pair in merges]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(parts, ensure_ascii=False))
    written = {
        "tokenizer_class": it.tokenizer_class,
        "bos_token": it.bos,
        "eos_token": it.eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1000000000000000019884624838656,
        **({} if it.cuts else {"unk_token": "<unk>"}),
        **it.config,
    }
    # As the hub's files, indented by two, in an order that no library writes.
    (folder / "tokenizer_config.json").write_text(json.dumps(written | config, indent=2))
    return len(ids)


def _byte(value, is_byte_level):
    if not is_byte_level:
        return f"<0x{value:02X}>"
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [each for each in range(256) if each not in kept]
    return chr(value if value in kept else 256 + rest.index(value))


def _word(part, is_byte_level):
    space, end = ("Ġ", "Ċ") if is_byte_level else (_SPACE, "<0x0A>")
    return part.replace("_", space).replace("~", end)


def _merges(it):
    return [pair for pair in _MERGES.split("|") if it.cuts or "~" not in pair]


def _byte_level(it):
    cuts = {"type": "Sequence", "pretokenizers": it.cuts}
    return {
        "normalizer": {"type": "NFC"} if it.nfc else None,
        "pre_tokenizer": cuts,
        "post_processor": _BYTES | {"trim_offsets": False},
        "decoder": _BYTES,
        "model": {"byte_fallback": False, "ignore_merges": False},
    }


def _sentencepiece(it):
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    steps = [{"type": "Prepend", "prepend": _SPACE}, replace]
    metaspace = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "first"}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    ends = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    ends.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": None if it.metaspace else {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": metaspace | {"split": False} if it.metaspace else None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [back, *ends]},
        "model": {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True},
    }
