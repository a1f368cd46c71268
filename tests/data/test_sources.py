"""Every source gives the texts it was written from, or is refused in one line with the place."""

import hashlib
import json
import re
import sysconfig
from pathlib import Path

import datasets
import pyarrow
import pytest
from written_text import TEXTS, jsonl, parquet_bytes, read, refusal_of, write

from dotmoe.common.errors import UserError
from dotmoe.text.config import DataConfig
from dotmoe.text.files import PIECE_CHARACTERS, cut
from dotmoe.text.rows import TEXT_FIELDS
from dotmoe.text.sources import documents, opened


@pytest.mark.parametrize("ending", ["", ".gz", ".zst", ".bz2"])
def test_every_format_gives_the_texts_it_was_written_from(tmp_path, ending):
    rows = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
    text_file = write(tmp_path / f"a.{'txt' if ending else 'md'}{ending}", TEXTS[2])
    line_file = write(tmp_path / f"b.jsonl{ending}", jsonl(rows) + "\n\n")
    also_lines = write(tmp_path / f"c4.json{ending}", jsonl(rows))
    array_file = write(tmp_path / f"d.json{ending}", " " + json.dumps(rows, indent=2))
    parquet_file = write(tmp_path / "c.parquet", parquet_bytes({"id": [0, 1, 2], "text": TEXTS}))
    given = read(parquet_file, text_file, line_file, also_lines, array_file)
    assert given == [*TEXTS, TEXTS[2], *TEXTS * 3]


@pytest.mark.parametrize("text", ["a\r\nb\rc\n\r\n", "é\r\n" * 200_000, "\r"])
def test_line_ends_are_those_of_text_mode(tmp_path, text):
    path = write(tmp_path / "a.txt", text + ".")
    assert "".join(read(path)) == path.read_text()
    rows = write(tmp_path / "a.jsonl", jsonl([{"text": text + "."}]))
    table = write(tmp_path / "a.parquet", parquet_bytes({"text": [text + "."]}))
    assert read(rows, table) == [path.read_text()] * 2


@pytest.mark.parametrize("field", TEXT_FIELDS)
def test_the_usual_fields_are_found(tmp_path, field):
    rows = [{"n": 1, field: text} for text in TEXTS]
    assert read(write(tmp_path / "a.jsonl", jsonl(rows))) == TEXTS
    table = {"n": [1, 1, 1], field: TEXTS}
    assert read(write(tmp_path / "a.parquet", parquet_bytes(table))) == TEXTS


def test_a_field_may_be_named_or_null_and_a_byte_order_mark_is_no_text(tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl([{"passage": "long", "text": "short", "mine": "own"}]))
    assert read(path) == ["short"]
    assert read(f"{path}#mine") == ["own"]
    assert "names the split test, but" in refusal_of(f"{path}@test#mine")
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": null}\n{"text": "b"}')
    assert read(path) == ["", "b"]
    assert read(write(tmp_path / "a.txt", b"\xef\xbb\xbfhello")) == ["hello"]


@pytest.mark.parametrize("unit", ["word wörd 🙂 ", "line of text\n", "a\n\n\n  b\r\n", "x", "\n"])
def test_a_long_text_is_cut_into_bounded_pieces_that_join_to_it(unit):
    text = unit * (3 * PIECE_CHARACTERS // len(unit) + 17) + "end"
    pieces = list(cut(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= PIECE_CHARACTERS


def test_pieces_are_cut_before_a_line_that_starts_with_a_sign():
    unit = "first line\n\n\n    indented\n\nlast\n"
    for shift in range(len(unit)):  # puts the limit at each place of the unit
        pieces = list(cut("x" * shift + unit * 2500))
        assert len(pieces) == 2
        assert all(piece.endswith("\n") and not piece[0].isspace() for piece in pieces)


def test_the_standard_library_is_a_source_in_two_parts_that_are_the_same_everywhere():
    root, others = Path(sysconfig.get_path("stdlib")), {"site-packages", "test", "tests"}
    train, heldout = set(read("python-stdlib")), set(read("python-stdlib-heldout"))
    assert not train & heldout
    assert 1 / 32 < len(heldout) / len(train) < 1 / 8
    assert {(root / name).read_text() for name in ("enum.py", "bz2.py", "pydoc.py")} <= heldout
    assert {(root / name).read_text() for name in ("ast.py", "json/decoder.py")} <= train
    library = [path for path in root.rglob("*.py") if not others.intersection(path.parts)]
    assert train | heldout <= {path.read_text(errors="ignore") for path in library}


# --- folders


@pytest.mark.parametrize("names", [["my_test.txt"], ["b/c/train.txt", "b/z.TXT", "my_test.txt"]])
def test_each_text_file_below_a_folder_is_a_document(tmp_path, names, caplog):
    for name in ["a.txt", *names]:
        write(tmp_path / "corpus" / name, f"{name}\nsecond line")
    write(tmp_path / "corpus/.git/c.txt", "x")
    write(tmp_path / "corpus/c.txt", "")
    write(tmp_path / "corpus/README.md", "x")  # read only where nothing else is
    in_order = [path.as_posix() for path in sorted(map(Path, ["a.txt", "c.txt", *names]))]
    assert [text.partition("\n")[0] or "c.txt" for text in read(tmp_path / "corpus")] == in_order
    assert [message.partition("; ")[2] for message in caplog.messages] == ["left out: README.md"]
    write(tmp_path / "corpus" / "rows.jsonl", jsonl([{"text": "x"}]))
    assert len([*filter(None, read(tmp_path / "corpus"))]) == 1 + len(names)
    assert len(caplog.messages) == 2, "each once"
    assert caplog.messages[1].endswith("most bytes; left out: README.md, rows.jsonl")
    assert "is empty" in refusal_of(write(tmp_path / "empty/a.txt", "").parent)


def test_names_that_all_say_a_split_are_splits(tmp_path, monkeypatch):
    folder = tmp_path / "corpus"
    write(folder / "data/train-0.jsonl.gz", jsonl([{"content": t, "body": "b"} for t in TEXTS]))
    write(folder / "data/valid.jsonl", jsonl([{"content": "v"}]))
    write(folder / "test/x.json", jsonl([{"content": "c", "body": "d"}]))
    assert read(folder) == TEXTS
    config = DataConfig(data=("x",))
    assert [each.text for each in opened(f"{folder}#body", config)] == ["b"] * 3
    assert [each.text for each in opened(f"{folder}@test#body", config)] == ["d"]
    assert read(f"{folder}@validation") == ["v"]
    assert "no file whose name says nonsense" in refusal_of(f"{folder}@nonsense")
    assert re.search(r"line 1 has no field 'no'; it has content", refusal_of(f"{folder}#no"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("~/corpus") == TEXTS


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("no_cache")
def test_what_datasets_saved_and_other_formats_are_read_by_datasets(tmp_path):
    rows = datasets.Dataset.from_dict({"n": [0, 1, 2], "text": TEXTS})
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=rows, test=rows.select([1])).save_to_disk(tmp_path / "splits")
    assert read(tmp_path / "saved") == read(tmp_path / "splits") == TEXTS
    assert read(f"{tmp_path / 'splits'}@test") == TEXTS[1:2]
    assert "has no split other. Name one of train, test." in refusal_of(f"{tmp_path}/splits@other")
    write(tmp_path / "table/train.csv", "n,content\n1,one\n2,two\n")
    write(tmp_path / "table/test.csv", "n,content\n3,three\n")
    assert read(tmp_path / "table") == ["one", "two"]
    assert read(f"{tmp_path}/table@test#content") == ["three"]
    card = "---\nconfigs:\n- config_name: default\n  data_files: b.jsonl\n---\n"
    write(tmp_path / "card/README.md", card)
    for name in "ab":
        write(tmp_path / f"card/{name}.jsonl", jsonl([{"text": name}]))
    assert read(tmp_path / "card") == ["b"]


@pytest.mark.usefixtures("no_cache")
def test_what_datasets_cannot_read_is_one_line_with_its_cause(tmp_path):
    write(tmp_path / "script/script.py", "")
    for source, cause in {
        f"{tmp_path}/script": "scripts are no longer supported",
        "nobody-at-all/no-such-text": "nobody-at-all/no-such-text",
    }.items():
        said = rf"cannot be read by datasets: .*{cause}.* Check its name, .*HF_HUB_OFFLINE unset"
        assert re.search(said, refusal_of(source))


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
        ("a.docx", "x", "{} is none of .txt, .md, .json, .jsonl (also with .gz"),
        ("a.gz", "x", "is none of"),
        ("a.parquet.gz", NO_TABLE, "{} cannot be read ("),
        ("a.txt", b"abc\xff", "{} cannot be read ('utf-8' codec can't decode byte 0xff"),
        ("a.json", '[{"text": "a"}, "b"]', "{} row 2 is not a JSON object"),
        ("a.json", '[{"text": "a"}', "{} is not JSON"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "a"}]}', "chat, but text is needed"),
        ("a.jsonl", b'{"text": "e"}\n{"text": "\xe9"}\n', "{} line 2 is not JSON in UTF-8"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b"\n', "{} line 2 is not JSON"),
        ("a.jsonl", '{"text": "a"}\n\n["b"]\n', "{} line 3 is not a JSON object"),
        ("a.jsonl", '{"text": ["a", "b"]}', "'text' in {} line 1 is list, not text"),
        ("a.jsonl", '{"text": "a"}\n{"body": "c"}', "{} line 2 has no field of text, content"),
        ("a.jsonl", r'{"text": "half a pair: \ud83d"}', "{} line 1 is not Unicode text"),
        ("a.parquet", parquet_bytes({"body": ["c"], "n": [1]}), "no field of text"),
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
    config = DataConfig(data=(str(present), str(write(tmp_path / "a.docx", "x"))))
    with pytest.raises(UserError, match=r"a\.docx is none of"):
        documents(config)
    assert "~no-such-user/a.txt does not exist" in refusal_of("~no-such-user/a.txt")
    assert "does not exist" in refusal_of("a text instead of a name, " * 99)
