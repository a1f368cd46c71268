"""Documents joined to one row of tokens. Oracle: the tokenizer, document by document."""

import pytest
import torch
from written_text import TEXTS, read, write

from dotmoe.data import pack
from dotmoe.errors import UserError
from dotmoe.load import LoadConfig, load_dense


class Bare:
    """A tokenizer without BOS and EOS."""

    bos_token_id = eos_token_id = None

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, texts, **options):
        return self.tokenizer(texts, **options)


def test_documents_are_separated_by_bos_else_eos_else_nothing(with_bos, without_bos):
    assert without_bos.bos_token_id is None
    plain = [without_bos.encode(text) for text in TEXTS]
    expected = {
        with_bos: [token for ids in plain for token in [0, *ids]],
        without_bos: [token for ids in plain for token in [*ids, 1]],
        Bare(without_bos): [token for ids in plain for token in ids],
    }
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    for tokenizer, tokens in expected.items():
        packed, tokens_per_byte = pack(["", *TEXTS, ""], tokenizer)  # no trace of empty ones
        assert packed.tolist() == tokens
        assert packed.dtype == torch.int32
        assert tokens_per_byte == pytest.approx(len(tokens) / num_bytes)


@pytest.mark.parametrize("tokenizer_name", ["with_bos", "without_bos"])
def test_a_document_in_pieces_packs_as_a_whole(tokenizer_name, request, tmp_path):
    tokenizer = request.getfixturevalue(tokenizer_name)
    long = "A line of some text.\n" * 20_000
    stream = [*read(write(tmp_path / "a.txt", long)), TEXTS[0]]
    assert len(stream) > 5
    tokens = pack(stream, tokenizer)[0]
    assert torch.equal(tokens, pack([long, TEXTS[0]], tokenizer)[0])
    assert int((tokens == (0 if tokenizer_name == "with_bos" else 1)).sum()) == 2
    assert tokenizer.decode(tokens, skip_special_tokens=True) == long + TEXTS[0]


def test_reading_stops_at_max_tokens(with_bos):
    def endless():
        number = 0
        while True:
            number += 1
            yield f"document {number} "

    tokens = pack(endless(), with_bos, 1000)[0]
    assert tokens.numel() == 1000
    assert torch.equal(tokens[:500], pack(endless(), with_bos, 500)[0])


def test_refuses_documents_without_text(with_bos):
    with pytest.raises(UserError, match="no text"):
        pack(["", ""], with_bos)


def test_real_stories_pack_and_read_back(shared_data):
    path = shared_data / "text/tinystories/train_slice.txt.gz"
    text = "".join(read(path))
    assert len(text.encode()) == 941_894
    dense = load_dense(str(shared_data / "models/stories260K"), LoadConfig(device="cpu"))
    flat = pack(read(path), dense.tokenizer, 20_000)[0]
    assert flat[0] == dense.tokenizer.bos_token_id
    decoded = dense.tokenizer.decode(flat[1:], skip_special_tokens=True)
    assert text.startswith(decoded.strip()[:-4])
