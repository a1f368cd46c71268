"""Every source gives the texts it was written from, or is refused in one line with the place."""

import hashlib
import re
import sysconfig
from pathlib import Path

import pyarrow
import pytest
from written_text import TEXTS, jsonl, parquet_bytes, read, refusal_of, write

from dotmoe.data.sources import (
    FIELDS,
    PIECE_CHARACTERS,
    Continuation,
    DataConfig,
    cut,
    documents,
    opened,
    stdlib_documents,
)
from dotmoe.errors import UserError


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_every_format_gives_the_texts_it_was_written_from(tmp_path, ending):
    rows = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
    text_file = write(tmp_path / f"a.txt{ending}", TEXTS[2])
    line_file = write(tmp_path / f"b.jsonl{ending}", jsonl(rows) + "\n\n")
    parquet_file = write(tmp_path / "c.parquet", parquet_bytes({"id": [0, 1, 2], "text": TEXTS}))
    assert read(parquet_file, text_file, line_file) == [*TEXTS, TEXTS[2], *TEXTS]


@pytest.mark.parametrize("field", FIELDS)
def test_the_usual_fields_are_found(tmp_path, field):
    rows = [{"n": 1, field: text} for text in TEXTS]
    assert read(write(tmp_path / "a.jsonl", jsonl(rows))) == TEXTS
    table = {"n": [1, 1, 1], field: TEXTS}
    assert read(write(tmp_path / "a.parquet", parquet_bytes(table))) == TEXTS


def test_a_field_may_be_named_or_null_and_a_byte_order_mark_is_no_text(tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl([{"passage": "long", "text": "short", "mine": "own"}]))
    assert read(path) == ["short"]
    assert read(path, text_field="mine") == read(f"{path}#mine") == ["own"]
    assert "names the split test, but" in refusal_of(f"{path}@test#mine")
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": null}\n{"text": "b"}')
    assert read(path) == ["", "b"]
    assert read(write(tmp_path / "a.txt", b"\xef\xbb\xbfhello")) == ["hello"]


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
    for shift in range(4):
        text = "a" * shift + "🙂" * 200_000
        assert "".join(read(write(tmp_path / "a.txt", text))) == text


def test_the_standard_library_is_a_source_in_two_parts_that_are_the_same_everywhere():
    root, others = Path(sysconfig.get_path("stdlib")), {"site-packages", "test", "tests"}
    train, heldout = set(read("python-stdlib")), set(read("python-stdlib-heldout"))
    assert not train & heldout
    assert 1 / 32 < len(heldout) / len(train) < 1 / 8
    assert {(root / name).read_text() for name in ("enum.py", "bz2.py", "pydoc.py")} <= heldout
    assert {(root / name).read_text() for name in ("ast.py", "json/decoder.py")} <= train
    library = [path for path in root.rglob("*.py") if not others.intersection(path.parts)]
    assert train | heldout <= {path.read_text(errors="ignore") for path in library}
    assert train <= set(stdlib_documents("train", include_tests=True))


def test_a_folder_is_streamed_by_datasets_and_each_may_have_a_split_and_a_field(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder / "train.jsonl", jsonl([{"content": text, "body": "b"} for text in TEXTS]))
    write(folder / "test.jsonl", jsonl([{"content": "c", "body": "d"}]))
    assert read(folder) == TEXTS
    config = DataConfig(data=("x",))
    assert list(opened(f"{folder}#body", config)) == ["b"] * 3
    assert list(opened(f"{folder}@test#body", config)) == ["d"]
    assert re.search(
        r"row 1 of .* has no field 'no'; it has content", refusal_of(folder, text_field="no")
    )
    assert "cannot be read by datasets" in refusal_of(folder, split="nonsense")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("~/corpus") == read(f"{folder}") == TEXTS
    write(folder / "corpus.py", "")
    assert "scripts are no longer supported" in refusal_of(folder)


# --- refusals

HASHES = jsonl([{"text": hashlib.sha256(bytes([n])).hexdigest()} for n in range(200)])
NO_UNICODE = pyarrow.array([b"\xff"]).view("string")
NO_TABLE = parquet_bytes({"text": pyarrow.array([], "string")})


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "", "{} is empty"),
        ("a.jsonl.gz", "\n \n", "{} is empty"),
        ("a.parquet", NO_TABLE, "{} is empty"),
        ("a.docx", "x", "{} is none of .txt, .txt.gz, .jsonl"),
        ("a.gz", "x", "is none of"),
        ("a.parquet.gz", NO_TABLE, "is none of"),
        ("a.txt", b"abc\xff", "{} is not UTF-8 text: a bad byte before byte"),
        ("a.txt", b"a" * 300_000 + b"\xf0\x9f\x99", "is not UTF-8 text"),
        ("a.txt", "ä".encode() * 131_072 + b"ok\x00", "is not UTF-8 text"),
        ("a.jsonl", b'{"text": "e"}\n{"text": "\xe9"}\n', "{} line 2 is not JSON in UTF-8"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b"\n', "{} line 2 is not JSON"),
        ("a.jsonl", '{"text": "a"}\n\n["b"]\n', "{} line 3 is not a JSON object"),
        ("a.jsonl", '{"text": ["a", "b"]}', "'text' in {} line 1 is list, not text"),
        ("a.jsonl", '{"text": "a"}\n{"body": "c"}', "{} line 2 has no field any of text, content"),
        ("a.jsonl", r'{"text": "half a pair: \ud83d"}', "'text' in {} line 1 is not Unicode text"),
        ("a.parquet", parquet_bytes({"body": ["c"], "n": [1]}), "no field any of text"),
        ("a.parquet", parquet_bytes({"text": NO_UNICODE}), "{} cannot be read ('utf-8' codec"),
        ("a.parquet", parquet_bytes({"text": [3]}), "row 1 is int, not text"),
        ("a.parquet", parquet_bytes({"text": TEXTS})[:100], "{} cannot be read ("),
        ("a.parquet", parquet_bytes({"text": TEXTS})[:-20], "{} cannot be read ("),
    ],
)
def test_refuses_a_file_that_holds_no_text_and_says_where(tmp_path, name, content, words):
    path = write(tmp_path / name, content)
    assert words.format(path) in refusal_of(path)


def test_refuses_what_is_no_whole_gzip_file(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", HASHES)
    for content in (path.read_bytes()[:-200], b"plain text"):
        path.write_bytes(content)
        assert f"{path} cannot be read (" in refusal_of(path)


def test_refuses_what_is_not_there_before_reading_any(tmp_path):
    assert "data names no source" in refusal_of()
    present = write(tmp_path / "train.txt", "x")
    config = DataConfig(data=(str(present), str(tmp_path / "trian.txt")))
    with pytest.raises(UserError, match=f"trian.txt does not exist. Did you mean {present}?"):
        documents(config)
    assert "~no-such-user/a.txt does not exist" in refusal_of("~no-such-user/a.txt")
    assert "does not exist" in refusal_of("a text instead of a name, " * 99)
    message = refusal_of("nobody-at-all/no-such-text")
    assert "nobody-at-all/no-such-text (train) cannot be read by datasets" in message
    assert "the network" in message
