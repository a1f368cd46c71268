"""Which tokenizers a GGUF can hold, and that llama.cpp then cuts text as Transformers does."""

import json
from dataclasses import replace

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as cuts
from transformers import PreTrainedTokenizerFast

from dotmoe.export.gguf_tokenizer import RULES, tokenizer_keys, tokenizer_name
from dotmoe.export.llama_cpp import LlamaCppModel
from runs import loaded

CORPUS = [
    "It's the 1st of 12 months; they'll say we've 365 days, I'm sure. You'RE not? HE'D be!",
    "def area(r):\n    return 3.14159 * r ** 2\n\n\nprint(area(10))  # 314.159\n\n\tend",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; naïve café Ærøskøbing.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. 我能吞下玻璃而不伤身体。 ١٢٣ ½",
    "a  b   c    d\n \n  \n\r\n\r\n x=1e-5;y+=2 --> [1,2,3]{k:v} <tag/> https://a.b/c?d=e&f=100000",
]
TEXTS = [
    *CORPUS,
    *("", "x", "1", "12345678901234567890", "tabs\t\tand \t mixed \n\n\n lines\n"),
    "CamelCase snake_case kebab-case 'quoted' \"double\" `tick` don't DON'T d'accord o'clock",
    "emoji 🙂🙃👩‍👩‍👧 flags 🇩🇪 and \u200b zero \ufeff width \xa0 space",
    "हिन्दी ภาษาไทย עברית العربية 日本語テキスト 한국어",
    "∑∫√ ² ³ Ⅷ ㊿ ½ ٣٤ \N{MATHEMATICAL DOUBLE-STRUCK DIGIT ONE}",
]
LLAMA3, QWEN2 = (RULES[name]["cuts"][0] for name in ("dbrx", "qwen2"))
HELLO = [("h", "e"), ("l", "l"), ("he", "ll"), ("\u2581", "hell")]


def trained(cut, *, ignore_merges=False, normalizer=None, alphabet=None):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = cut
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(alphabet or cuts.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def split(pattern, behavior="isolated", invert=False):
    bare = cuts.ByteLevel(add_prefix_space=False, use_regex=False)
    return cuts.Sequence([cuts.Split(Regex(pattern), behavior, invert), bare])


def ruled(name, *change):
    """A tokenizer that cuts by one of the rules, or by the rule with a trifle changed."""
    rule, bare = RULES[name], cuts.ByteLevel(add_prefix_space=False, use_regex=False)
    patterns = [each.replace(*change) if change else each for each in rule["cuts"]]
    assert (patterns != rule["cuts"]) is bool(change)
    steps = [cuts.Split(Regex(pattern), "isolated") for pattern in patterns]
    return trained(cuts.Sequence([*steps, bare]), ignore_merges=rule.get("whole_words", False))


def byte_fallback(merges, *, normalizer="prepend", missing=None, special=()):
    """A tokenizer in LLaMA 2's form with a few letters."""
    letters = ["\u2581", *"abcdehlo"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    tokens += dict.fromkeys("".join(pair) for pair in merges)
    vocabulary = {token: number for number, token in enumerate(tokens) if token != missing}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    first = normalizers.Prepend("\u2581") if normalizer == "prepend" else normalizers.Lowercase()
    tokenizer.normalizer = normalizers.Sequence([first, normalizers.Replace(" ", "\u2581")])
    tokenizer.add_special_tokens(special or ["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def of_phi3():
    keep = [AddedToken(name, special=True) for name in ("<unk>", "<s>", "<|endoftext|>")]
    take = [AddedToken(name, special=True, rstrip=True) for name in ("</s>", "<|end|>")]
    return byte_fallback(HELLO, special=[*keep, *take])


def with_a_word_that_no_merge_makes(takes_words):
    parts = json.loads(trained(split(LLAMA3)).backend_tokenizer.to_str())
    parts["model"]["vocab"]["wxyz"] = 500
    parts["model"]["ignore_merges"] = takes_words
    backend = Tokenizer.from_str(json.dumps(parts))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    assert (500 in tokenizer("wxyz wxyz").input_ids) is takes_words
    return tokenizer


GPT2 = cuts.ByteLevel(add_prefix_space=False, use_regex=True)
MARKED = [*TEXTS, "<think>so<|end|> <think>"]
WORDS = ["wxyz", "wxyz wxyz", "awxyz"]
HELLOS = ["hello hell", "  hello", "hhelllo\n", "é hell", "ab cde"]
KNOWN = {
    "gpt2/gpt-2": (lambda: trained(GPT2), MARKED),
    "gpt2/smollm": (lambda: trained(cuts.Sequence([cuts.Digits(True), GPT2])), MARKED),
    "gpt2/dbrx": (lambda: trained(split(LLAMA3, "removed", True)), MARKED),
    "gpt2/smollm, some bytes": (
        lambda: trained(cuts.Sequence([cuts.Digits(True), GPT2]), alphabet="abc"),
        CORPUS,
    ),
    "gpt2/llama-bpe, a word": (lambda: with_a_word_that_no_merge_makes(True), WORDS),
    "gpt2/dbrx, a word": (lambda: with_a_word_that_no_merge_makes(False), WORDS),
    "llama/default": (lambda: byte_fallback(HELLO), HELLOS),
    "llama/default, of Phi-3": (of_phi3, ["hello<|end|>  hello"]),
    **{f"gpt2/{name}, by its patterns": (lambda name=name: ruled(name), MARKED) for name in RULES},
}


@pytest.fixture
def holding(dense_of):
    """A tiny dense model with another tokenizer."""
    return lambda tokenizer: replace(dense_of("llama", vocab_size=512), tokenizer=tokenizer)


@pytest.fixture
def written(exported):
    """The dense model as GGUF, checked on token ids that every vocabulary has."""

    def write(dense, tokenizer="auto"):
        split, ids_BT = {"num_experts": dense.widths.ffn // 4}, torch.arange(3, 99).view(1, 96)
        options = {"format": "gguf_dense", "gguf_type": "f32", "gguf_tokenizer": tokenizer}
        return exported(dense, split, text_BT=ids_BT, **options)

    return write


@pytest.fixture
def require_same_tokens(written):
    """Fails unless llama.cpp cuts texts as Transformers does."""

    def require(dense, texts, name):
        keys, notes = tokenizer_keys(dense, "auto", "models/other")
        assert tokenizer_name(keys) == name
        pytest.importorskip("llama_cpp")
        made = written(dense)
        assert made.record.details["tokenizer"] == name
        with LlamaCppModel(made.folder / "model-f32.gguf", context=8) as model:
            found = {text: model.tokenize(text) for text in texts}
        assert found == {text: list(dense.tokenizer(text).input_ids) for text in texts}
        return notes

    return require


@pytest.mark.parametrize("name", list(KNOWN))
def test_the_rule_that_cuts_text_is_recognised_and_llama_cpp_cuts_alike(
    name, holding, require_same_tokens
):
    made, texts = KNOWN[name]
    dense, rule = holding(made()), name.split(",")[0]
    keys, notes = tokenizer_keys(dense, "auto", "models/other")
    differs = RULES.get(rule[5:], {}).get("approximate", "some bytes" in name)
    assert bool(notes) is differs
    tokens, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert (len(tokens), len(kinds), tokens[511], kinds[511]) == (512, 512, "[PAD511]", 5)
    if texts is MARKED:
        assert (kinds[0], kinds[1], kinds[480]) == (3, 1, 4)
    require_same_tokens(dense, texts, rule)


def test_the_embedded_tokenizer(require_same_tokens):
    require_same_tokens(loaded("embedded"), TEXTS, "gpt2/gpt-2")


def test_a_sentencepiece_tokenizer(require_same_tokens, shared_data):
    folder = shared_data / "models/stories260K"
    if not folder.is_dir():
        pytest.skip(f"no checkpoint at {folder}")
    dense = loaded(folder)
    notes = require_same_tokens(dense, [text.lstrip() for text in TEXTS], "llama/default")
    assert any("space before every text" in note for note in notes)


@pytest.mark.parametrize("source", ["models/other", "models/phi3-mini", "models/Phi-3-mini"])
def test_the_name_says_phi3_if_and_only_if_the_tokenizer_is_its(source, holding):
    """llama.cpp then lets special tokens take the spaces after them."""
    for tokenizer, is_phi3 in ((of_phi3(), True), (byte_fallback(HELLO), False)):
        keys, notes = tokenizer_keys(holding(tokenizer), "auto", source)
        name = keys["general.name"].lower()
        assert ("phi-3" in name or "phi3" in name) is is_phi3
        assert notes == []


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (lambda: trained(split(r"\p{L}+|\P{L}+")), "no known rule of llama.cpp"),
        (lambda: trained(split(LLAMA3.replace("{1,3}", "{1,2}"))), "no known rule of llama.cpp"),
        (lambda: trained(split(QWEN2), ignore_merges=True), "no known rule of llama.cpp"),
        (lambda: trained(cuts.ByteLevel(add_prefix_space=True)), "no known rule of llama.cpp"),
        (lambda: ruled("gpt-2", "'s|", ""), "no known rule of llama.cpp"),
        (lambda: ruled("qwen2", "\\p{L}+|", "\\w+|"), "no known rule of llama.cpp"),
        (lambda: ruled("tekken", "/", ""), "no known rule of llama.cpp"),
        (lambda: ruled("viking", "!", ""), "no known rule of llama.cpp"),
        (lambda: trained(GPT2, normalizer=normalizers.Lowercase()), "Lowercase"),
        (
            lambda: byte_fallback([("h", "e"), ("e", "l"), ("he", "l")]),
            "'h' and 'el' are not merged into 'hel'",
        ),
        (
            lambda: byte_fallback([("a", "b"), ("b", "c"), ("ab", "c"), ("d", "e"), ("a", "bc")]),
            "merges of 'abc' are not consecutive",
        ),
        (lambda: byte_fallback([], normalizer="lower"), "treats spaces"),
        (lambda: byte_fallback([], missing="<0x41>"), "<0x41> is not in its vocabulary"),
    ],
)
def test_an_unknown_tokenizer_is_left_out_and_said_so(tokenizer, reason, holding):
    keys, (note,) = tokenizer_keys(holding(tokenizer()), "auto", "models/other")
    assert keys == {"general.name": "other", "tokenizer.ggml.model": "none"}
    assert reason in note


def test_what_the_tokenizer_says_besides_is_carried(holding):
    tokenizer = trained(split(QWEN2), normalizer=normalizers.NFC())
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    keys, notes = tokenizer_keys(holding(tokenizer), "auto", "models/other")
    assert keys["tokenizer.chat_template"] == tokenizer.chat_template
    assert keys["tokenizer.ggml.eos_token_id"] == 0
    assert any("NFC" in note for note in notes)


def test_the_beginning_of_a_text_is_added_where_transformers_adds_it(dense_of):
    for family, adds in {"llama": True, "qwen2": False}.items():
        keys, _ = tokenizer_keys(dense_of(family), "auto", "models/other")
        assert keys["tokenizer.ggml.add_bos_token"] is adds
        assert keys["tokenizer.ggml.add_eos_token"] is False
