import math

import pytest
import torch

from dotmoe.data import Continuation
from dotmoe.errors import UserError
from dotmoe.evaluate.gptq_text import gptq_packed
from dotmoe.evaluate.perplexity import EvaluateConfig, perplexity
from dotmoe.load import LoadConfig, load_dense

ROWS = ["", " = A heading = \n", "", " Some text , and more .\n", " The next paragraph .\n", ""]
"""As the data set has them: a blank line is an empty row."""
FILE = "\n = A heading = \n \n Some text , and more .\n The next paragraph .\n\n"


@pytest.fixture(params=["llama", "qwen2"])
def dense(request, tiny_dense):
    return load_dense(str(tiny_dense(request.param)), LoadConfig(device="cpu"))


def test_the_rows_of_the_data_set_are_joined(dense):
    expected = dense.tokenizer("\n\n".join(ROWS)).input_ids
    pieces = [FILE[:20], Continuation(FILE[20:])]
    assert gptq_packed(pieces, dense.tokenizer, None).tokens.tolist() == expected
    assert gptq_packed([FILE], dense.tokenizer, 9).tokens.tolist() == expected[:9]


def test_the_number_is_that_of_the_scripts_of_the_literature(dense):
    """The loop of GPTQ's `opt.py` and `llama.py`, written down again."""
    text, window = FILE * 6, 32
    joined = "\n\n".join(ROWS * 6)
    ids = torch.tensor([dense.tokenizer(joined).input_ids])
    num_windows = ids.numel() // window
    assert ids.numel() % window
    nlls = []
    for i in range(num_windows):
        batch = ids[:, i * window : (i + 1) * window]
        with torch.no_grad():
            logits = dense.model(batch).logits
        loss = torch.nn.CrossEntropyLoss()(logits[0, :-1], batch[0, 1:])
        nlls.append(loss.float() * window)
    expected = float(torch.exp(torch.stack(nlls).sum() / (num_windows * window)))
    config = EvaluateConfig(window=window, protocol="gptq")
    found = perplexity(dense.model, dense.tokenizer, [text], config)
    assert found.perplexity == pytest.approx(expected, rel=1e-5)
    assert found.tokens == num_windows * (window - 1)
    assert "Lines joined" in found.protocol
    packed = perplexity(dense.model, dense.tokenizer, [text], EvaluateConfig(window=window))
    assert abs(packed.perplexity / found.perplexity - 1) > 1e-3
    in_bytes = found.loss / math.log(2) * ids.numel() / len(text.encode())
    assert found.bits_per_byte == pytest.approx(in_bytes)


def test_a_text_that_fills_no_window_is_refused(dense):
    with pytest.raises(UserError, match="fill no window of 200"):
        perplexity(
            dense.model, dense.tokenizer, [FILE], EvaluateConfig(window=200, protocol="gptq")
        )


def test_wikitext_has_the_rows_of_the_data_set(shared_data):
    """4,358 rows, as `wikitext-2-raw-v1` states for its test split."""
    from dotmoe.data import DataConfig, documents

    path = shared_data / "text/wikitext2/wiki.test.raw.txt.gz"
    seen = []

    class Tokenizer:
        def __call__(self, text, verbose):
            seen.append(text)
            return type("Encoding", (), {"input_ids": [1, 2]})

    gptq_packed(documents(DataConfig(data=(str(path),))), Tokenizer(), None)
    joined = seen[0]
    file = "".join(documents(DataConfig(data=(str(path),))))
    lines = file.splitlines(keepends=True)
    assert len(lines) == 4358
    assert joined == "\n\n".join(line if line.strip() else "" for line in lines)
