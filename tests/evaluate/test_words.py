"""Perplexity a word by rolling log-likelihood. Oracle: lm-evaluation-harness."""

import math
import re

import pytest

from dotmoe.data import Continuation
from dotmoe.errors import UserError
from dotmoe.evaluate import EvaluateConfig, TextConfig, evaluate
from dotmoe.evaluate.scoring import stock_nats
from dotmoe.evaluate.words import rolling_perplexity, rolling_windows, whole_documents
from dotmoe.load import LoadConfig, load_dense

TEXTS = ["The cat sat on the mat.  It\nsat.\n" * 5, "Zwölf Boxkämpfer.", "x = [1, 2, 3]\n" * 11]


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 17, 31, 32, 40])
def test_windows_are_those_of_the_harness(num_tokens):
    harness = pytest.importorskip("lm_eval.utils")
    tokens = list(range(1, num_tokens + 1))
    row = [0, *tokens]
    found = [
        (row[part], row[1:][part][-scored:]) for part, scored in rolling_windows(num_tokens, 16)
    ]
    assert found == list(harness.get_rolling_token_windows(tokens, 0, 16, 1))


@pytest.mark.parametrize("family", ["llama", "qwen2", "granite"])
def test_the_number_is_the_one_of_the_harness(family, tiny_dense):
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    pytest.importorskip("accelerate")
    from lm_eval.api.instance import Instance

    dense = load_dense(str(tiny_dense(family)), LoadConfig(device="cpu"))
    words = sum(len(re.split(r"\s+", text)) for text in TEXTS)
    requests = [
        Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
        for text in TEXTS
    ]
    for window in (7, 32, 256):
        runner = huggingface.HFLM(
            pretrained=dense.model, tokenizer=dense.tokenizer, max_length=window, batch_size=3
        )
        expected = -sum(runner.loglikelihood_rolling(requests, disable_tqdm=True))
        found = rolling_perplexity(stock_nats(dense.model), dense.tokenizer, TEXTS, window)
        assert math.log(found["word_perplexity"]) == pytest.approx(expected / words, rel=1e-5)
        num_bytes = sum(len(text.encode()) for text in TEXTS)
        assert found["bits_per_byte"] == pytest.approx(expected / math.log(2) / num_bytes, rel=1e-5)
        assert (found["words"], found["bytes"], found["documents"]) == (words, num_bytes, 3)


def test_pieces_of_a_file_are_one_document():
    assert whole_documents(["a", Continuation("b"), Continuation("c"), "d"]) == ["abc", "d"]


def test_the_result_names_text_and_convention_and_the_window_fits_the_context(tiny_dense, tmp_path):
    (tmp_path / "text.txt").write_text(TEXTS[0])
    model, corpus = str(tiny_dense("qwen2")), TextConfig(text=(str(tmp_path / "text.txt"),))
    found = evaluate(EvaluateConfig(model=model, word_perplexity=(32,), corpus=corpus))
    assert found["text"] == [str(tmp_path / "text.txt")]
    assert "every token scored once" in found["protocol"]
    assert found["model"]["windows"][0]["words"] > 30
    with pytest.raises(UserError, match="the window is 257, but must lie in 1 to 256"):
        evaluate(EvaluateConfig(model=model, word_perplexity=(257,), corpus=corpus))
    dense = load_dense(model, LoadConfig(device="cpu"))
    with pytest.raises(UserError, match="the text has no tokens"):
        rolling_perplexity(stock_nats(dense.model), dense.tokenizer, [""], 16)
