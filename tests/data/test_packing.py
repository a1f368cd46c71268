"""Documents joined to one row of tokens. Oracle: the tokenizer, document by document."""

import logging

import pytest
import torch
from written_text import TEXTS, read, write

from dotmoe.data import pack
from dotmoe.errors import UserError
from dotmoe.load import LoadConfig, load_dense


def test_each_document_is_preceded_by_bos(with_bos):
    expected = [token for text in TEXTS for token in [0, *with_bos.encode(text)[1:]]]
    packed = pack(TEXTS, with_bos)
    assert packed.tokens.tolist() == expected
    assert packed.tokens.dtype == torch.int32
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    assert packed.tokens_per_byte == pytest.approx(len(expected) / num_bytes)


def test_each_document_is_followed_by_eos_where_there_is_no_bos(without_bos):
    assert without_bos.bos_token_id is None
    expected = [token for text in TEXTS for token in [*without_bos.encode(text), 1]]
    assert pack(TEXTS, without_bos).tokens.tolist() == expected


def test_nothing_is_put_between_where_there_is_neither(without_bos):
    class Bare:
        bos_token_id = eos_token_id = None

        def __call__(self, texts, **options):
            return without_bos(texts, **options)

    expected = [token for text in TEXTS for token in without_bos.encode(text)]
    assert pack(TEXTS, Bare()).tokens.tolist() == expected


@pytest.mark.parametrize("tokenizer_name", ["with_bos", "without_bos"])
def test_a_document_in_pieces_packs_as_a_whole(tokenizer_name, request, tmp_path):
    tokenizer = request.getfixturevalue(tokenizer_name)
    long = "A line of some text.\n" * 20_000
    path = write(tmp_path / "a.txt", long)
    stream = [*read(path), TEXTS[0]]
    assert len(stream) > 5
    tokens = pack(stream, tokenizer).tokens
    assert torch.equal(tokens, pack([long, TEXTS[0]], tokenizer).tokens)
    separator = 0 if tokenizer_name == "with_bos" else 1
    assert int((tokens == separator).sum()) == 2
    assert tokenizer.decode(tokens, skip_special_tokens=True) == long + TEXTS[0]


def test_empty_documents_leave_no_trace(with_bos):
    assert torch.equal(pack(["", *TEXTS, ""], with_bos).tokens, pack(TEXTS, with_bos).tokens)


def test_long_texts_give_no_warning_of_the_tokenizer(tiny_dense, caplog):
    tokenizer = load_dense(str(tiny_dense("llama")), LoadConfig(device="cpu")).tokenizer
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        pack(["word " * 5000], tokenizer)
        assert caplog.text == ""
        tokenizer("word " * 5000)
        assert "sequence length is longer" in caplog.text
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)


def test_reading_stops_at_max_tokens(with_bos):
    def endless():
        number = 0
        while True:
            number += 1
            yield f"document {number} "

    seen = []
    tokens = pack(endless(), with_bos, 1000, seen.append).tokens
    assert tokens.numel() == 1000
    assert seen[-1] == 1000
    assert torch.equal(tokens[:500], pack(endless(), with_bos, 500).tokens)


def test_refuses_documents_without_text(with_bos):
    with pytest.raises(UserError, match="no text"):
        pack(["", ""], with_bos)


def test_real_stories_pack_and_read_back(shared_data):
    path = shared_data / "text/tinystories/train_slice.txt.gz"
    text = "".join(read(path))
    assert len(text.encode()) == 941_894
    dense = load_dense(str(shared_data / "models/stories260K"), LoadConfig(device="cpu"))
    flat = pack(read(path), dense.tokenizer, 20_000).tokens
    assert flat[0] == dense.tokenizer.bos_token_id
    decoded = dense.tokenizer.decode(flat[1:], skip_special_tokens=True)
    assert text.startswith(decoded.strip()[:-4])
