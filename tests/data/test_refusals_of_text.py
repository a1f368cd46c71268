"""Bad sources are refused in one line that names file and place."""

import hashlib
import re

import pyarrow
import pytest
from written_text import TEXTS, jsonl, parquet_bytes, refusal_of, write

from dotmoe.data import DataConfig, documents
from dotmoe.errors import UserError


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
    "content",
    [
        b"abc\xff",
        b"\x89PNG\r\n",
        "Boxk\u00e4mpfer".encode("latin-1"),
        b"a" * 300_000 + b"\xf0\x9f\x99",
        "ä".encode() * 131_072 + b"ok\x00",
    ],
)
def test_says_that_a_file_is_not_text_and_where_about(tmp_path, content):
    path = write(tmp_path / "a.txt", content)
    found = re.search(r"is not UTF-8 text: a bad byte before byte ([\d,]+)", refusal_of(path))
    assert 0 < int(found[1].replace(",", "")) <= len(content)
    path = write(tmp_path / "a.jsonl", '{"text": "é"}\n'.encode() + b'{"text": "\xe9"}\n')
    assert "a bad byte in line 2." in refusal_of(path)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
def test_refuses_a_file_that_is_only_named_gzip(tmp_path, name):
    (tmp_path / name).write_text("plain text")
    assert "is no sound gzip file" in refusal_of(tmp_path / name)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
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
