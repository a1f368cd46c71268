import math
import re

import pytest
import torch
import torch.nn.functional as F

from dotmoe.data import Continuation
from dotmoe.errors import UserError
from dotmoe.evaluate import head_chunks
from dotmoe.evaluate.rolling import rolling_perplexity, rolling_windows, whole_documents
from dotmoe.load import LoadConfig, load_dense

TEXTS = ["The cat sat on the mat.  It\nsat.\n" * 5, "Zwölf Boxkämpfer.", "x = [1, 2, 3]\n" * 11]


@pytest.fixture(scope="module", params=["llama", "qwen2", "granite"])
def dense(request, tiny_dense):
    return load_dense(str(tiny_dense(request.param)), LoadConfig(device="cpu"))


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 17, 31, 32, 40])
def test_windows_are_those_of_the_harness(num_tokens):
    harness = pytest.importorskip("lm_eval.utils")
    tokens = list(range(1, num_tokens + 1))
    expected = [
        (inputs, labels) for inputs, labels in harness.get_rolling_token_windows(tokens, 0, 16, 1)
    ]
    row = [0, *tokens]
    found = [
        (row[part], row[1:][part][-scored:]) for part, scored in rolling_windows(num_tokens, 16)
    ]
    assert found == expected


@pytest.mark.parametrize("window", [7, 32, 256])
def test_log_likelihood_is_the_one_of_the_harness(dense, window):
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    pytest.importorskip("accelerate")
    from lm_eval.api.instance import Instance

    runner = huggingface.HFLM(
        pretrained=dense.model, tokenizer=dense.tokenizer, max_length=window, batch_size=3
    )
    requests = [
        Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
        for text in TEXTS
    ]
    expected = -sum(runner.loglikelihood_rolling(requests, disable_tqdm=True))
    found = rolling_perplexity(dense.model, dense.tokenizer, TEXTS, window)
    assert found.nats == pytest.approx(expected, rel=1e-5)
    words = sum(len(re.split(r"\s+", text)) for text in TEXTS)
    assert found.words == words
    assert found.word_perplexity == pytest.approx(math.exp(expected / words), rel=1e-4)


def test_a_document_within_one_window_is_scored_by_one_pass(dense, monkeypatch):
    monkeypatch.setattr(head_chunks, "CHUNK_LOGITS", 264 * 5)
    ids = dense.tokenizer(TEXTS[1]).input_ids
    bos = dense.tokenizer.bos_token_id
    row = torch.tensor([[dense.tokenizer.eos_token_id if bos is None else bos, *ids]])
    with torch.no_grad():
        logits = dense.model(input_ids=row[:, :-1]).logits[0]
    expected = float(F.cross_entropy(logits, row[0, 1:], reduction="sum"))
    found = rolling_perplexity(dense.model, dense.tokenizer, [TEXTS[1]], 64)
    assert found.nats == pytest.approx(expected, rel=1e-5)
    num_bytes = len(TEXTS[1].encode())
    assert found.bits_per_byte == pytest.approx(expected / math.log(2) / num_bytes, rel=1e-5)
    assert (found.tokens, found.bytes, found.documents) == (len(ids), num_bytes, 1)


def test_pieces_of_a_file_are_one_document():
    assert whole_documents(["a", Continuation("b"), Continuation("c"), "d"]) == ["abc", "d"]


def test_a_window_beyond_the_context_and_a_text_without_tokens_are_refused(tiny_dense):
    dense = load_dense(str(tiny_dense("qwen2")), LoadConfig(device="cpu"))
    with pytest.raises(UserError, match="the window is 257, but must lie in 1 to 256"):
        rolling_perplexity(dense.model, dense.tokenizer, TEXTS, 257)
    with pytest.raises(UserError, match="the text has no tokens"):
        rolling_perplexity(dense.model, dense.tokenizer, [""], 16)
