"""Every source gives the texts it was written from."""

import pytest
from written_text import TEXTS, jsonl, parquet_bytes, read, refusal_of, write

from dotmoe.data import Continuation, DataConfig, documents
from dotmoe.data.files import PIECE_CHARACTERS, cut
from dotmoe.stdlib_text import stdlib_files


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_every_format_gives_the_texts_it_was_written_from(tmp_path, ending):
    rows = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
    text_file = write(tmp_path / f"a.txt{ending}", TEXTS[2])
    line_file = write(tmp_path / f"b.jsonl{ending}", jsonl(rows) + "\n\n")
    table = {"id": [0, 1, 2], "text": TEXTS}
    parquet_file = write(tmp_path / "c.parquet", parquet_bytes(table))
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


def test_boolq_is_read_by_its_passage_field(shared_data):
    texts = documents(DataConfig(data=(str(shared_data / "benchmarks/boolq/train.jsonl.gz"),)))
    texts = list(texts)
    assert len(texts) == 9427
    assert all(" -- " in text for text in texts[:20])
