"""Perplexity a token and a word. Oracles: known chances, Transformers' own loss, the scripts of
GPTQ, lm-evaluation-harness.
"""

import json
import math
import re
import shutil
import weakref
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoConfig, AutoModelForCausalLM

from dotmoe.common.errors import UserError
from dotmoe.export import llama_cpp
from dotmoe.export.config import GgufConfig
from dotmoe.export.write import export
from dotmoe.measure.config import TextConfig
from dotmoe.measure.evaluate import EvaluateConfig, evaluate, models
from dotmoe.measure.evaluate.difference import difference, error_over, nats_with_error
from dotmoe.measure.evaluate.models import row_nats, stock_nats
from dotmoe.measure.evaluate.perplexity import packed_text, perplexity
from dotmoe.models import scoring
from dotmoe.models.config import LoadConfig
from dotmoe.models.load import load_weights
from dotmoe.text.rows import Document

TEXTS = ["The cat sat on the mat.\n" * 9, "Zwölf Boxkämpfer jagen Viktor.", "x = [1, 2, 3]\n" * 11]
ROWS = ["", " = A heading = \n", "", " Some text , and more .\n", " The next paragraph .\n", ""]
"""As the data set has them: a blank line is an empty row."""
FILE = "\n = A heading = \n \n Some text , and more .\n The next paragraph .\n\n"
CPU = LoadConfig(device="cpu")


class FixedChances:
    """Predicts token t with chance ~ t + 1 whatever came before: its loss is known by hand."""

    def __init__(self, vocabulary=264):
        self.shapes = []
        self.nats_V = torch.arange(1, vocabulary + 1).double().log().log_softmax(0).neg()

    def __call__(self, tokens_BT):
        self.shapes.append(tuple(tokens_BT.shape))
        return self.nats_V[tokens_BT[:, 1:].long()]


def text_of(dense, texts=TEXTS, **options):
    with patch("dotmoe.measure.evaluate.perplexity.documents", lambda *_: map(Document, texts)):
        return packed_text(TextConfig(**options), dense.tokenizer)


def ids_of(dense, texts=TEXTS):
    return [token for text in texts for token in [0, *dense.tokenizer.encode(text)[1:]]]


def test_loss_equals_the_sum_by_hand_with_a_partial_last_window(dense):
    nats, ids = FixedChances(), ids_of(dense)
    assert len(ids) % 50 >= 2
    scored = [token for place, token in enumerate(ids) if place % 50]
    told = []
    result = perplexity(nats, text_of(dense), 50, 3, lambda *progress: told.append(progress))
    expected = float(nats.nats_V[scored].mean())
    assert result["tokens"] == len(scored)
    assert result["loss"] == pytest.approx(expected, rel=1e-9)
    assert result["perplexity"] == pytest.approx(math.exp(expected))
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    assert result["bits_per_byte"] == pytest.approx(expected / math.log(2) * len(ids) / num_bytes)
    sums = [nats.nats_V[ids[start + 1 : start + 50]] for start in range(0, len(ids), 50)]
    assert result["window_losses"] == pytest.approx([float(w.mean()) for w in sums], abs=1e-6)
    # The survey's error of a ratio of sums over clusters of unequal size (Cochran, 6.4).
    counts = np.array([len(each) for each in sums])
    off = np.array([float(each.sum()) for each in sums]) - expected * counts
    variance = len(sums) * np.var(off, ddof=1) / counts.sum() ** 2
    assert result["stderr"] == pytest.approx(variance**0.5, rel=1e-4)
    assert f"over {len(sums)} windows, fewer than 16: a rough one" in result["protocol"]
    assert told == [(done, len(ids)) for done in (150, 300, 400, len(ids))]


def test_a_difference_has_the_error_of_pairs():
    """SciPy's paired t statistic is the difference over its standard error."""
    generator = np.random.default_rng(0)
    hard = generator.normal(3, 0.5, 20)
    sides = [hard + generator.normal(shift, 0.01, 20) for shift in (0.004, 0.0)]
    a, b = (
        {"loss": side.mean(), "window_losses": side.tolist(), "window": 9, "tokens": 160}
        for side in sides
    )
    change, stderr = difference(a, b)
    assert change / stderr == pytest.approx(stats.ttest_rel(*sides).statistic)
    alone = error_over(a["window_losses"], [8] * 20)
    assert alone == pytest.approx(stats.sem(sides[0]))
    assert alone > 10 * stderr  # windows differ far more than models do
    assert difference(a, {"loss": 1.0, "window": 9, "tokens": 160})[1] is None
    assert error_over([1.0], [1]) is None
    for factor, mark in ((1.9, " (inconclusive)"), (2.1, "")):
        shown = nats_with_error(-factor * 0.01, 0.01, "+.3f")
        assert shown == f"{-factor * 0.01:+.3f} ± 0.010{mark}"


@pytest.mark.parametrize(
    ("text", "shapes"),
    [("abcdefg", [(2, 4)]), ("abcdefgh", [(2, 4)]), ("abcdefghi", [(2, 4), (1, 2)])],
)
def test_a_last_window_counts_from_two_tokens_up(dense, text, shapes):
    nats = FixedChances()
    scored = sum(rows * (tokens - 1) for rows, tokens in shapes)
    assert perplexity(nats, text_of(dense, [text]), 4)["tokens"] == scored
    assert nats.shapes == shapes  # <s> makes one token more


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {}), ("granite", {"logits_scaling": 3.0}), ("olmo2", {})],
)
def test_loss_is_the_one_that_transformers_computes(family, options, dense_of, monkeypatch):
    dense = dense_of(family, **options)
    other = AutoModelForCausalLM.from_pretrained(dense.folder)
    total, count = 0.0, 0
    for row in torch.tensor(ids_of(dense))[None].split(64, dim=1):
        with torch.no_grad():
            total += float(other(input_ids=row, labels=row).loss) * (row.shape[1] - 1)
        count += row.shape[1] - 1
    for batch_size, chunk in ((1, 1 << 25), (5, 264 * 7), (100, 1)):
        monkeypatch.setattr(scoring, "CHUNK_LOGITS", chunk)
        result = perplexity(stock_nats(dense.model), text_of(dense), 64, batch_size)
        assert result["tokens"] == count
        assert result["loss"] == pytest.approx(total / count, rel=1e-5)


SIZES = {
    **{"vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_position_embeddings": 128},
}
STOCK = [
    ("opt", {}, True),
    ("gpt_neox", {}, True),
    ("bert", {"is_decoder": True}, False),  # has a layer before its head
    ("hyperclovax", {"logits_scaling": 0.25}, False),  # multiplies, where Granite divides
    ("hyperclovax", {"logits_scaling": 1.0}, True),
]
"""A stock model that dotmoe cannot split, and whether its logits are as usual."""


@pytest.mark.parametrize(("kind", "options", "is_usual"), STOCK)
def test_a_stock_model_is_measured_as_its_own_forward_says_or_refused(
    kind, options, is_usual, tiny_dense, tmp_path
):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **options)).eval()
    row_BT = torch.arange(2, 66)[None]
    if is_usual:
        with torch.no_grad():
            loss = float(model(input_ids=row_BT, labels=row_BT).loss)
        assert float(stock_nats(model)(row_BT).mean()) == pytest.approx(loss, rel=1e-5)
    model.save_pretrained(tmp_path)
    for file in tiny_dense("llama").glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    if is_usual:
        assert load_weights(tmp_path, "auto") is not None
    else:
        with pytest.raises(
            UserError, match=f"is a {kind}, and dotmoe does not know how its logits"
        ):
            load_weights(tmp_path, "auto")


def test_other_runtimes_and_formats_are_scored_in_float32_and_no_gradient_is_recorded(dense_of):
    dense = dense_of("llama", load_dtype="bfloat16")
    tokens = torch.tensor(ids_of(dense))[:96].view(3, 32)

    def logits_of(row):
        with torch.no_grad():
            return dense.model(input_ids=row[None].long()).logits[0]

    found, by_runtime = stock_nats(dense.model)(tokens), row_nats(logits_of)(tokens)
    exact = [-logits_of(row[:-1]).double().log_softmax(-1)[range(31), row[1:]] for row in tokens]
    assert float(found.sum()) == pytest.approx(float(torch.stack(exact).sum()), rel=1e-6)
    torch.testing.assert_close(by_runtime, torch.stack(exact))
    assert (found.shape, found.requires_grad) == ((3, 31), False)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_gptq_number_is_that_of_the_scripts_of_the_literature(family, dense_of):
    """The loop of GPTQ's `opt.py` and `llama.py`, written down again."""
    dense = dense_of(family)
    text, window = FILE * 6, 32
    ids = torch.tensor([dense.tokenizer("\n\n".join(ROWS * 6)).input_ids])
    joined = text_of(dense, [text], protocol="gptq")
    assert joined.tokens.tolist() == ids[0].tolist()
    assert text_of(dense, ROWS * 6, protocol="gptq").tokens.tolist() == ids[0].tolist()
    assert len(text_of(dense, [text], protocol="gptq", max_tokens=9).tokens) == 9
    num_windows, rest = divmod(ids.numel(), window)
    assert rest
    nlls = []
    for batch in ids[:, : num_windows * window].split(window, dim=1):
        with torch.no_grad():
            logits = dense.model(batch).logits
        nlls.append(torch.nn.CrossEntropyLoss()(logits[0, :-1], batch[0, 1:]).float() * window)
    expected = float(torch.exp(torch.stack(nlls).sum() / (num_windows * window)))
    nats = stock_nats(dense.model)
    found = perplexity(nats, joined, window)
    assert found["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert found["tokens"] == num_windows * (window - 1)
    packed = perplexity(nats, text_of(dense, [text]), window)
    assert abs(packed["perplexity"] / expected - 1) > 1e-3
    in_bytes = found["loss"] / math.log(2) * ids.numel() / len(text.encode())
    assert found["bits_per_byte"] == pytest.approx(in_bytes)
    with pytest.raises(UserError, match="fill no window of 4000"):
        perplexity(nats, joined, 4000)


def test_max_tokens_is_the_most_that_is_read_and_the_window_fits_the_context(dense):
    def endless():
        while True:
            yield TEXTS[0]

    text = text_of(dense, endless(), max_tokens=125)
    assert perplexity(FixedChances(), text, 50)["tokens"] == 49 + 49 + 24
    assert [TextConfig().window_in(context) for context in (64, 4096)] == [64, 2048]
    with pytest.raises(UserError, match="window is 65, but must lie in 2 to 64"):
        TextConfig(window=65).window_in(64)


def test_what_cannot_be_scored_is_refused(dense):
    broken = FixedChances()
    broken.nats_V[3:] = float("nan")
    with pytest.raises(UserError, match="the model is broken"):
        perplexity(broken, text_of(dense), 32)
    with pytest.raises(UserError, match="no text"):
        text_of(dense, ["", ""])
    with pytest.raises(UserError, match="1 tokens of text"):
        perplexity(FixedChances(), text_of(dense, max_tokens=1), 32)


def test_the_result_says_what_was_measured_and_how(tiny_dense, tmp_path):
    """Name, number format, command and versions stand beside a plain perplexity, too."""
    model, source = str(tiny_dense("llama")), tmp_path / "text.txt"
    source.write_text("".join(TEXTS))
    corpus = TextConfig(text=[source], window=32)
    config = EvaluateConfig(model=model, out=tmp_path / "out", corpus=corpus, load=CPU)
    found = evaluate(config)["perplexity"]
    assert json.loads((tmp_path / "out" / "perplexity.json").read_text()) == found
    assert (found["name"], found["dtype"], found["unit"]) == (model, "float32", "token")
    assert found["origin"] == "measured"
    assert all(found["provenance"][each] for each in ("command", "versions"))
    assert found["text"] == [str(source)]
    assert re.search("<s> before each.* windows of 32 tokens", found["protocol"])


def test_of_two_models_both_are_there_at_first_and_one_is_in_memory(
    tiny_dense, text_file, monkeypatch
):
    real, loaded = models.loaded, []

    def load_alone(folder, load):
        assert [model() for model in loaded] == [None] * len(loaded)
        stock = real(folder, load)
        loaded.append(weakref.ref(stock.model))
        return stock

    monkeypatch.setattr(models, "loaded", load_alone)
    model, corpus = str(tiny_dense("llama")), TextConfig(text=(str(text_file),), max_tokens=64)
    both = evaluate(EvaluateConfig(model=model, against=model, corpus=corpus, load=CPU))[
        "perplexity"
    ]
    assert both["model"] == both["against"]
    assert len(loaded) == 2
    with pytest.raises(UserError, match="nowhere does not exist"):
        evaluate(EvaluateConfig(model=model, against="./nowhere", corpus=corpus, load=CPU))
    assert len(loaded) == 2


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tokenizer.json", "{}", "cannot be loaded .*'added_tokens'"),
        ("tokenizer_config.json", "{", "cannot be loaded .*line 1 column 2"),
        (
            "config.json",
            '{"model_type": "unheard"}',
            "no valid .* model type `unheard`",
        ),
        ("config.json", '{"model_type": "llama", "num_attention_heads": 5}', "not a multiple"),
    ],
)
def test_a_checkpoint_that_transformers_cannot_load_is_refused(
    name, text, words, copied, text_file
):
    (copied / name).write_text(text)
    config = EvaluateConfig(model=str(copied), corpus=TextConfig(text=(str(text_file),)), load=CPU)
    with pytest.raises(UserError, match=words):
        evaluate(config)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory: you tried")])
def test_memory_that_runs_out_is_not_the_fault_of_the_checkpoint(error, tmp_path):
    with pytest.raises(type(error)), models.loading(tmp_path):
        raise error


def test_the_embedded_model_is_not_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "embedded").mkdir()
    assert models.model_folder("embedded").parent.name == "models"


def test_the_window_of_a_gguf_is_bounded_by_the_context_that_its_file_states(
    dense_of, layout_of, tmp_path, monkeypatch
):
    """Not by what the tokenizer says, whose limit has nothing to do with the file."""
    dense = dense_of("llama", max_position_embeddings=64)
    (tmp_path / "text.txt").write_text("".join(TEXTS))
    tokens = torch.tensor(ids_of(dense))[:128].view(2, 64)
    config = GgufConfig(format="gguf_dense", gguf_type="f32")
    export(dense, (layout_of(dense),), tmp_path / "out", config, tokens)
    contexts, source = [], (str(tmp_path / "text.txt"),)

    @contextmanager
    def even_chances(path, *, context):
        contexts.append(context)
        yield SimpleNamespace(logits=lambda tokens_T: torch.zeros(len(tokens_T), 264))

    def measured(window=None):
        corpus = TextConfig(text=source, window=window)
        config = EvaluateConfig(model="~/out", corpus=corpus, tokenizer=dense.source)
        return evaluate(config)["perplexity"]

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(llama_cpp, "LlamaCppModel", even_chances)
    assert dense.tokenizer.model_max_length == 256
    found = measured()
    assert (contexts, found["window"]) == ([64], 64)
    assert found["loss"] == pytest.approx(math.log(264))
    with pytest.raises(UserError, match="2 to 64, the model's context"):
        measured(window=128)
    with (tmp_path / "out/model-f32.gguf").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    with pytest.raises(UserError, match=r"model-f32\.gguf.*Export the run again"):
        measured()
