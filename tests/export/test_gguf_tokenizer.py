"""Which tokenizers a GGUF can hold, and that llama.cpp then cuts text as Transformers does."""

import json
import re
from dataclasses import replace

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as cuts
from transformers import PreTrainedTokenizerFast

from dotmoe.export import ExportConfig, GgufConfig, export
from dotmoe.export.tokenizer import LLAMA3, QWEN2, general_name, tokenizer_keys
from dotmoe.layout import ExpertLayout
from dotmoe.llama_cpp import LlamaCppModel
from dotmoe.load import LoadConfig, load_dense

CORPUS = [
    "It's the 1st of 12 months; they'll say we've 365 days, I'm sure. You'RE not? HE'D be!",
    "def area(r):\n    return 3.14159 * r ** 2\n\n\nprint(area(10))  # 314.159\n\n\tend",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; naïve café Ærøskøbing.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. 我能吞下玻璃而不伤身体。 ١٢٣ ½",
    "a  b   c    d\n \n  \n\r\n\r\n x=1e-5;y+=2 --> [1,2,3]{k:v} <tag/> https://a.b/c?d=e&f=100000",
] * 4
TEXTS = [
    *CORPUS[:5],
    "",
    "x",
    "1",
    "12345678901234567890",
    "no space at the end ",
    "tabs\t\tand \t mixed \n\n\n lines\n",
    "CamelCase snake_case kebab-case 'quoted' \"double\" `tick` don't DON'T d'accord o'clock",
    "emoji 🙂🙃👩‍👩‍👧 flags 🇩🇪 and \u200b zero \ufeff width \xa0 space",
    "हिन्दी ภาษาไทย עברית العربية 日本語テキスト 한국어",
    "∑∫√ ² ³ Ⅷ ㊿ ½ ٣٤ \N{MATHEMATICAL DOUBLE-STRUCK DIGIT ONE}",
]


def trained(cut, *, ignore_merges=False, normalizer=None, vocabulary=480):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = cut
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(cuts.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def split(pattern, behavior="isolated", invert=False):
    return cuts.Sequence(
        [
            cuts.Split(Regex(pattern), behavior, invert),
            cuts.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


GPT2 = cuts.ByteLevel(add_prefix_space=False, use_regex=True)
KNOWN = {
    "gpt-2": (GPT2, {}),
    "smollm": (cuts.Sequence([cuts.Digits(individual_digits=True), GPT2]), {}),
    "llama-bpe": (split(LLAMA3), {"ignore_merges": True}),
    "dbrx": (split(LLAMA3, "removed", True), {}),
    "qwen2": (split(QWEN2), {}),
}


@pytest.fixture(scope="session")
def llama_cpp():
    """Skips where llama-cpp-python is not installed."""
    pytest.importorskip("llama_cpp")


def written(dense, out, tokenizer="auto"):
    """The dense model as GGUF, checked on token ids that every vocabulary has."""
    layout = ExpertLayout(
        expert_of_neuron_LN=torch.arange(dense.widths.ffn)
        .remainder(2)
        .repeat(dense.widths.layers, 1),
        router_LED=torch.zeros(dense.widths.layers, 2, dense.widths.model),
        active_experts=1,
    )
    tokens_BT, config = torch.arange(3, 99).view(1, 96), ExportConfig(format="gguf_dense")
    gguf = GgufConfig(type="f32", tokenizer=tokenizer)
    return export(dense, layout, out, config, tokens_BT, gguf=gguf)


@pytest.fixture
def holding(tiny_dense):
    """A tiny dense model with another tokenizer."""

    def make(tokenizer):
        folder = tiny_dense("llama", vocab_size=512)
        dense = load_dense(str(folder), LoadConfig(device="cpu"))
        return replace(dense, tokenizer=tokenizer)

    return make


@pytest.mark.parametrize("pre", list(KNOWN))
def test_the_rule_that_cuts_text_is_recognised(pre, holding):
    cut, options = KNOWN[pre]
    metadata = tokenizer_keys(holding(trained(cut, **options)), "auto")
    assert metadata.name == f"gpt2/{pre}"
    assert len(metadata.keys["tokenizer.ggml.tokens"]) == 512
    assert metadata.keys["tokenizer.ggml.tokens"][511] == "[PAD511]"
    kinds = metadata.keys["tokenizer.ggml.token_type"]
    assert (kinds[0], kinds[1], kinds[480], kinds[511]) == (3, 1, 4, 5)
    assert metadata.keys["tokenizer.ggml.add_bos_token"] is False


@pytest.mark.parametrize("pre", list(KNOWN))
def test_llama_cpp_cuts_text_as_transformers_does(pre, holding, llama_cpp, tmp_path):
    cut, options = KNOWN[pre]
    tokenizer = trained(cut, **options)
    texts = [*TEXTS, "<think>so<|end|> <think>"]
    assert_same_tokens(holding(tokenizer), texts, tmp_path, f"gpt2/{pre}")
    # A wrong rule could be seen: by some other one these texts become other tokens.
    mine = [tokenizer.tokenize(text) for text in texts]
    theirs = []
    for other, _ in KNOWN.values():
        tokenizer.backend_tokenizer.pre_tokenizer = other
        theirs.append([tokenizer.tokenize(text) for text in texts])
    assert any(tokens != mine for tokens in theirs)


@pytest.mark.parametrize(("pre", "takes_words"), [("llama-bpe", True), ("dbrx", False)])
def test_words_that_no_merge_makes(pre, takes_words, holding, llama_cpp, tmp_path):
    parts = json.loads(trained(split(LLAMA3)).backend_tokenizer.to_str())
    parts["model"]["vocab"]["wxyz"] = 500
    parts["model"]["ignore_merges"] = takes_words
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(parts)), eos_token="<|end|>"
    )
    assert (500 in tokenizer("wxyz wxyz").input_ids) is takes_words
    assert_same_tokens(holding(tokenizer), ["wxyz", "wxyz wxyz", "awxyz"], tmp_path, f"gpt2/{pre}")


def test_the_embedded_tokenizer(llama_cpp, tmp_path):
    dense = load_dense("embedded", LoadConfig(device="cpu"))
    assert_same_tokens(dense, TEXTS, tmp_path, "gpt2/gpt-2")


def test_a_sentencepiece_tokenizer(llama_cpp, shared_data, tmp_path):
    folder = shared_data / "models/stories260K"
    if not folder.is_dir():
        pytest.skip(f"no checkpoint at {folder}")
    dense = load_dense(str(folder), LoadConfig(device="cpu"))
    texts = [text.lstrip() for text in TEXTS]
    record = assert_same_tokens(dense, texts, tmp_path, "llama/default")
    assert any("space before every text" in note for note in record.notes)
    with LlamaCppModel(tmp_path / "out/model-f32.gguf", context=8) as model:
        # The one difference, which the record states.
        assert model.tokenize(" a") != dense.tokenizer(" a").input_ids


def assert_same_tokens(dense, texts, tmp_path, name):
    record = written(dense, tmp_path / "out")
    assert record.details["tokenizer"] == name
    with LlamaCppModel(tmp_path / "out/model-f32.gguf", context=8) as model:
        found = {text: model.tokenize(text) for text in texts}
    assert found == {text: list(dense.tokenizer(text).input_ids) for text in texts}
    return record


def byte_fallback(merges, *, normalizer="prepend", missing=None):
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
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def test_sentencepiece_in_its_own_form(holding, llama_cpp, tmp_path):
    tokenizer = byte_fallback([("h", "e"), ("l", "l"), ("he", "ll"), ("\u2581", "hell")])
    texts = ["hello hell", "  hello", "hhelllo\n", "é hell", "ab cde"]
    dense = holding(tokenizer)
    record = assert_same_tokens(dense, texts, tmp_path, "llama/default")
    assert record.notes == []


def test_spaces_after_special_tokens_as_in_phi3(holding, llama_cpp, tmp_path):
    """llama.cpp decides by the name of the model, which must not be left to chance."""
    stripping = byte_fallback([("h", "e"), ("l", "l"), ("he", "ll"), ("\u2581", "hell")])
    vocabulary = stripping.get_vocab()
    keep = [AddedToken(name, special=True) for name in ("<unk>", "<s>", "<|endoftext|>")]
    take = [AddedToken(name, special=True, rstrip=True) for name in ("</s>", "<|end|>")]
    parts = json.loads(stripping.backend_tokenizer.to_str())
    parts["added_tokens"] = []
    bare = Tokenizer.from_str(json.dumps(parts))
    bare.add_special_tokens([*keep, *take])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bare, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    assert len(vocabulary) < len(tokenizer.get_vocab())
    plain = byte_fallback([("h", "e"), ("l", "l"), ("he", "ll"), ("\u2581", "hell")])
    for each, is_phi3 in ((tokenizer, True), (plain, False)):
        for source in ("models/other", "models/phi3-mini"):
            dense = replace(holding(each), source=source)
            metadata = tokenizer_keys(dense, "auto")
            assert metadata.strips_as_phi3 is is_phi3
            assert metadata.notes == []
            says = re.search("phi-?3", general_name(source, metadata), re.IGNORECASE)
            assert (says is not None) is is_phi3
    texts = ["hello<|end|>  hello", "<s> hell", "hello</s> hell"]
    dense = replace(holding(tokenizer), source="models/other")
    assert_same_tokens(dense, texts[:1], tmp_path, "llama/default")


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (lambda: trained(split(r"\p{L}+|\P{L}+")), "no rule known here"),
        (lambda: trained(split(LLAMA3.replace("{1,3}", "{1,2}"))), "no rule known here"),
        (lambda: trained(split(QWEN2), ignore_merges=True), "no rule known here"),
        (lambda: trained(cuts.ByteLevel(add_prefix_space=True)), "a space before a text"),
        (lambda: trained(GPT2, normalizer=normalizers.Lowercase()), "Lowercase"),
        (
            lambda: byte_fallback([("h", "e"), ("e", "l"), ("he", "l")]),
            "'h' and 'el' are not merged into 'hel'",
        ),
        (
            lambda: byte_fallback([("a", "b"), ("b", "c"), ("ab", "c"), ("d", "e"), ("a", "bc")]),
            "merges of 'abc' do not stand together",
        ),
        (lambda: byte_fallback([], normalizer="lower"), "treats spaces"),
        (lambda: byte_fallback([], missing="<0x41>"), "<0x41> is not in its vocabulary"),
    ],
)
def test_an_unknown_tokenizer_is_left_out_and_said_so(tokenizer, reason, holding):
    metadata = tokenizer_keys(holding(tokenizer()), "auto")
    assert metadata.keys == {"tokenizer.ggml.model": "none"}
    (note,) = metadata.notes
    assert reason in note


def test_a_file_without_tokenizer_runs_token_ids(holding, llama_cpp, tmp_path):
    dense = holding(trained(GPT2))
    record = written(dense, tmp_path / "out", tokenizer="none")
    assert record.details["tokenizer"] == "none"
    assert record.verification.run.tokenized_texts == 0
    assert record.verification.run.logits_error < 1e-5


def test_composition_of_characters_is_told(holding):
    metadata = tokenizer_keys(holding(trained(split(QWEN2), normalizer=normalizers.NFC())), "auto")
    assert metadata.name == "gpt2/qwen2"
    assert any("NFC" in note for note in metadata.notes)


def test_the_chat_template_and_special_ids_are_carried(holding):
    tokenizer = trained(GPT2)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    metadata = tokenizer_keys(holding(tokenizer), "auto")
    assert metadata.keys["tokenizer.chat_template"] == tokenizer.chat_template
    assert metadata.keys["tokenizer.ggml.eos_token_id"] == 0


def test_the_beginning_of_a_text_is_added_where_transformers_adds_it(tiny_dense):
    for family, adds in {"llama": True, "qwen2": False}.items():
        dense = load_dense(str(tiny_dense(family)), LoadConfig(device="cpu"))
        metadata = tokenizer_keys(dense, "auto")
        assert metadata.keys["tokenizer.ggml.add_bos_token"] is adds
        assert metadata.keys["tokenizer.ggml.add_eos_token"] is False
