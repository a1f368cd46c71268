import gzip
import hashlib
import json
import logging
import resource
from collections import Counter

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from dotmoe.data import Continuation, DataConfig, TokenBlocks, documents, pack, pack_blocks
from dotmoe.data.files import PIECE_CHARACTERS, cut
from dotmoe.errors import UserError
from dotmoe.load import LoadConfig, load_dense
from dotmoe.stdlib_text import stdlib_files

TEXTS = ["The cat sat on the mat.\n", "Zwölf Boxkämpfer 🙂", "x = [1, 2]\n\n\ty = 3"]


@pytest.fixture(scope="module")
def with_bos(tiny_dense):
    return load_dense(str(tiny_dense("llama")), LoadConfig(device="cpu")).tokenizer


@pytest.fixture(scope="module")
def without_bos(tiny_dense):
    return load_dense(str(tiny_dense("qwen2")), LoadConfig(device="cpu")).tokenizer


def read(*sources, **options):
    return list(documents(DataConfig(data=tuple(map(str, sources)), **options)))


def refusal_of(*sources, **options):
    with pytest.raises(UserError) as caught:
        read(*sources, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def write(path, content):
    """Plain or, where the name ends so, gzip-compressed."""
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def parquet_bytes(columns):
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue().to_pybytes()


def jsonl(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


# --- sources


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_every_format_gives_the_texts_it_was_written_from(tmp_path, ending):
    rows = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
    text_file = write(tmp_path / f"a.txt{ending}", TEXTS[2])
    line_file = write(tmp_path / f"b.jsonl{ending}", jsonl(rows) + "\n\n")
    table = {"id": [0, 1, 2], "text": TEXTS}
    parquet_file = write(tmp_path / f"c.parquet{ending}", parquet_bytes(table))
    assert read(text_file) == [TEXTS[2]]
    assert read(line_file) == TEXTS
    assert read(parquet_file) == TEXTS
    assert read(parquet_file, text_file, line_file) == [*TEXTS, TEXTS[2], *TEXTS]


@pytest.mark.parametrize("field", ["text", "content", "page", "passage", "document"])
def test_the_usual_fields_are_found(tmp_path, field):
    rows = [{"n": 1, field: text} for text in TEXTS]
    table = {"n": [1, 1, 1], field: TEXTS}
    assert read(write(tmp_path / "a.jsonl", jsonl(rows))) == TEXTS
    assert read(write(tmp_path / "a.parquet", parquet_bytes(table))) == TEXTS


def test_text_wins_over_other_fields_unless_one_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl([{"passage": "long", "text": "short", "mine": "own"}]))
    assert read(path) == ["short"]
    assert read(path, text_field="passage") == ["long"]
    assert read(path, text_field="mine") == ["own"]


def test_a_null_is_an_empty_text(tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl([{"text": None}, {"text": "b"}]))
    assert read(path) == ["", "b"]


def test_a_byte_order_mark_is_not_text(tmp_path):
    assert read(write(tmp_path / "a.txt", b"\xef\xbb\xbfhello")) == ["hello"]
    assert read(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "hello"}')) == ["hello"]


@pytest.mark.parametrize("unit", ["word wörd 🙂 ", "line of text\n", "a\n\n\n  b\r\n", "x", "\n"])
def test_a_long_text_comes_in_bounded_pieces_that_join_to_it(tmp_path, unit):
    text = unit * (3 * PIECE_CHARACTERS // len(unit) + 17) + "end"
    pieces = read(write(tmp_path / "a.txt.gz", text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= PIECE_CHARACTERS
    assert [type(piece) for piece in pieces] == [str, *[Continuation] * (len(pieces) - 1)]
    assert list(cut(text)) == pieces


def test_pieces_are_cut_before_a_line_that_starts_with_a_sign():
    unit = "first line\n\n\n    indented\n\nlast\n"
    for shift in range(len(unit)):  # puts the limit at each place of the unit
        pieces = list(cut("x" * shift + unit * 2500))
        assert len(pieces) == 2
        assert all(piece.endswith("\n") and not piece[0].isspace() for piece in pieces)


def test_characters_split_between_reads_survive(tmp_path):
    # Reads are 256 KiB; an odd start puts 4-byte characters across each border.
    for shift in range(4):
        text = "a" * shift + "🙂" * 200_000
        assert "".join(read(write(tmp_path / "a.txt", text))) == text


def test_the_standard_library_is_a_source_in_two_parts():
    for name, split in (("python-stdlib", "train"), ("python-stdlib-heldout", "heldout")):
        first = next(documents(DataConfig(data=(name,))))
        texts = {path.read_text() for path in stdlib_files(split)[:3]}
        assert first in texts


def test_a_folder_is_streamed_by_datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder / "train.jsonl", jsonl([{"content": text} for text in TEXTS]))
    assert read(folder) == TEXTS
    message = refusal_of(folder, text_field="body")
    assert "row 1 of" in message
    assert "has no field 'body'; it has content" in message
    assert "cannot be read by datasets" in refusal_of(folder, split="nonsense")


# --- what is refused


def test_refuses_no_source():
    assert "data names no source" in refusal_of()


def test_refuses_a_missing_file_before_reading_any_and_proposes_its_neighbour(tmp_path):
    present = write(tmp_path / "train.txt", "x")
    config = DataConfig(data=(str(present), str(tmp_path / "trian.txt")))
    with pytest.raises(UserError) as caught:
        documents(config)
    assert f"trian.txt does not exist. Did you mean {present}?" in str(caught.value)


def test_refuses_an_unknown_dataset_in_one_line():
    message = refusal_of("nobody-at-all/no-such-text")
    assert "nobody-at-all/no-such-text (train) cannot be read by datasets" in message
    assert "the network" in message


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("content", ["", "\n \n"])
def test_refuses_an_empty_file(tmp_path, name, content):
    path = write(tmp_path / name, content)
    assert refusal_of(path).startswith(f"{path} is empty")


def test_refuses_an_empty_table(tmp_path):
    path = write(tmp_path / "a.parquet", parquet_bytes({"text": pyarrow.array([], "string")}))
    assert refusal_of(path).startswith(f"{path} is empty")


def test_refuses_an_unknown_format(tmp_path):
    assert "none of .txt, .jsonl, .parquet" in refusal_of(write(tmp_path / "a.docx", "x"))
    assert "none of .txt" in refusal_of(write(tmp_path / "a.gz", "x"))


@pytest.mark.parametrize(
    ("content", "offset"),
    [
        (b"abc\xff", 3),
        (b"\x89PNG\r\n", 0),
        ("Boxk\u00e4mpfer".encode("latin-1"), 4),
        (b"a" * 300_000 + b"\xf0\x9f\x99", 300_000),
        ("ä".encode() * 131_072 + b"ok\x00", 262_146),
        (b"x" + "🙂".encode() * 65_536 + b"\xfe", 262_145),
    ],
)
def test_names_the_offset_of_a_byte_that_is_not_text(tmp_path, content, offset):
    path = write(tmp_path / "a.txt", content)
    assert f"{path} is not UTF-8 text: bad byte at offset {offset:,}." in refusal_of(path)


def test_names_the_offset_in_a_jsonl_file(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "é"}\n'.encode() + b'{"text": "\xe9"}\n')
    assert "bad byte at offset 25." in refusal_of(path)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.parquet.gz"])
def test_refuses_a_file_that_is_only_named_gzip(tmp_path, name):
    (tmp_path / name).write_text("plain text")
    assert "is no sound gzip file" in refusal_of(tmp_path / name)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.parquet.gz"])
def test_refuses_a_truncated_gzip_file(tmp_path, name):
    rows = jsonl([{"text": hashlib.sha256(bytes([n])).hexdigest()} for n in range(200)])
    path = write(tmp_path / name, rows)
    path.write_bytes(path.read_bytes()[:-200])
    assert f"{path} is a truncated or damaged gzip file" in refusal_of(path)


def test_names_the_line_that_is_not_json(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n{"text": "b"\n')
    assert f"{path} line 2 is not JSON" in refusal_of(path)
    path = write(tmp_path / "b.jsonl", '{"text": "a"}\n\n["b"]\n')
    assert f"{path} line 3 is not a JSON object" in refusal_of(path)


def test_lists_the_fields_there_are(tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl([{"text": "a"}, {"title": "b", "body": "c"}]))
    message = refusal_of(path)
    assert f"{path} line 2 has no field any of text, content" in message
    assert "it has title, body." in message
    table = write(tmp_path / "a.parquet", parquet_bytes({"title": ["b"], "body": ["c"]}))
    assert "has no field 'txt'; it has title, body." in refusal_of(table, text_field="txt")


def test_refuses_a_field_that_is_not_text(tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl([{"text": ["a", "b"]}]))
    assert f"'text' in {path} line 1 is list, not text" in refusal_of(path)
    table = write(tmp_path / "a.parquet", parquet_bytes({"text": [3]}))
    assert "row 1 is int, not text" in refusal_of(table)


@pytest.mark.parametrize("keep", [3, 100, -20])
def test_refuses_a_damaged_parquet_file(tmp_path, keep):
    content = parquet_bytes({"text": TEXTS})
    path = write(tmp_path / "a.parquet", content[:keep])
    assert f"{path} is no whole parquet file" in refusal_of(path)


# --- packing


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


# --- blocks


def numbered_blocks(num_blocks, seq_len=4):
    return TokenBlocks(
        torch.arange(num_blocks * seq_len, dtype=torch.int32).view(num_blocks, seq_len)
    )


def test_blocks_are_the_packed_text_cut_in_order(with_bos):
    tokens = pack(TEXTS, with_bos).tokens
    blocks = pack_blocks(TEXTS, with_bos, 16)
    assert blocks.num_blocks == len(tokens) // 16
    assert (blocks.seq_len, blocks.num_tokens) == (16, 16 * blocks.num_blocks)
    assert torch.equal(blocks.tokens_BT.flatten(), tokens[: blocks.num_tokens])


def test_refuses_text_shorter_than_a_block(with_bos):
    with pytest.raises(UserError, match="the text has 6 tokens, but one block of 16"):
        pack_blocks(["12345"], with_bos, 16)
    with pytest.raises(UserError, match="12 tokens of the text are asked for, but one block of 16"):
        pack_blocks(TEXTS, with_bos, 16, max_tokens=12)
    with pytest.raises(UserError, match="seq_len is 1"):
        pack_blocks(TEXTS, with_bos, 1)


@pytest.mark.parametrize(("num_blocks", "batch_size"), [(7, 3), (8, 4), (5, 12), (1, 2)])
def test_every_epoch_shows_every_block_once_even_across_batches(num_blocks, batch_size):
    blocks = numbered_blocks(num_blocks)
    steps = 5 * num_blocks
    dealt = torch.cat([blocks.batch(step, batch_size, seed=3) for step in range(steps)])
    rows = (dealt[:, 0] // 4).tolist()
    for epoch in range(len(rows) // num_blocks):
        part = rows[epoch * num_blocks : (epoch + 1) * num_blocks]
        assert sorted(part) == list(range(num_blocks))
    assert dealt.dtype == torch.int64


def test_a_batch_depends_on_its_arguments_alone():
    blocks = numbered_blocks(50)
    in_order = [blocks.batch(step, 7, seed=1) for step in range(40)]
    fresh = numbered_blocks(50)
    for step in (39, 3, 20, 0):
        assert torch.equal(fresh.batch(step, 7, seed=1), in_order[step])


def test_epochs_and_seeds_have_orders_of_their_own():
    blocks = numbered_blocks(100)
    orders = [
        tuple(blocks.batch(epoch, 100, seed)[:, 0].tolist())
        for seed in range(4)
        for epoch in range(5)
    ]
    assert len(set(orders)) == 20
    # Where a block lands is spread evenly: mean place near the middle for each of 100 blocks.
    places = np.argsort(np.array(orders), axis=1).mean()
    assert places == pytest.approx(49.5)
    assert max(Counter(order[0] for order in orders).values()) <= 3


def test_a_saved_file_loads_as_it_was(tmp_path, with_bos):
    blocks = pack_blocks(TEXTS, with_bos, 8)
    path = tmp_path / "blocks.safetensors"
    blocks.save(path)
    loaded = TokenBlocks.load(path)
    assert torch.equal(loaded.tokens_BT, blocks.tokens_BT)
    assert loaded.sha256 == blocks.sha256
    assert torch.equal(loaded.batch(5, 3, 0), blocks.batch(5, 3, 0))
    assert [item.name for item in tmp_path.iterdir()] == ["blocks.safetensors"]


def test_the_fingerprint_is_of_length_and_little_endian_tokens():
    blocks = numbered_blocks(6)
    content = np.arange(24, dtype="<i4").tobytes()
    assert blocks.sha256 == hashlib.sha256(b"4:" + content).hexdigest()
    assert blocks.sha256 != numbered_blocks(3, 8).sha256


def test_saving_replaces_and_a_failed_save_keeps_the_old_file(tmp_path):
    path = tmp_path / "blocks.safetensors"
    numbered_blocks(3).save(path)
    numbered_blocks(5).save(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(UserError, match=r"\(160,000 bytes\) cannot be written"):
            numbered_blocks(10_000).save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [item.name for item in tmp_path.iterdir()] == ["blocks.safetensors"]
    assert TokenBlocks.load(path).num_blocks == 5


@pytest.mark.parametrize("place", [-1, 30, None])
def test_refuses_a_damaged_or_missing_file_of_blocks(tmp_path, place):
    path = tmp_path / "blocks.safetensors"
    if place is not None:
        numbered_blocks(5).save(path)
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"blocks.safetensors .*Delete it to tokenise again"):
        TokenBlocks.load(path)


def test_the_tail_is_kept_apart_in_whole_blocks():
    blocks = numbered_blocks(10)
    head, tail = blocks.without_tail(9)
    assert (head.num_blocks, tail.num_blocks) == (7, 3)
    assert torch.equal(torch.cat([head.tokens_BT, tail.tokens_BT]), blocks.tokens_BT)
    head, tail = blocks.without_tail(10_000)
    assert (head.num_blocks, tail.num_blocks) == (5, 5)
    with pytest.raises(UserError, match="gives 1 block of 4 tokens"):
        numbered_blocks(1).without_tail(4)


# --- real text


def test_boolq_is_read_by_its_passage_field(shared_data):
    texts = documents(DataConfig(data=(str(shared_data / "benchmarks/boolq/train.jsonl.gz"),)))
    texts = list(texts)
    assert len(texts) == 9427
    assert all(" -- " in text for text in texts[:20])


def test_real_stories_pack_and_read_back(shared_data):
    path = shared_data / "text/tinystories/train_slice.txt.gz"
    text = "".join(read(path))
    assert len(text.encode()) == 941_894
    dense = load_dense(str(shared_data / "models/stories260K"), LoadConfig(device="cpu"))
    blocks = pack_blocks(read(path), dense.tokenizer, 512, max_tokens=20_000)
    assert blocks.num_blocks == 39
    flat = blocks.tokens_BT.flatten()
    assert flat[0] == dense.tokenizer.bos_token_id
    decoded = dense.tokenizer.decode(flat[1:], skip_special_tokens=True)
    assert text.startswith(decoded.strip()[:-4])
