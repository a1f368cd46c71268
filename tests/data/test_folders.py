"""Which files of a folder are read. Oracle: the file that holds the text, read alone."""

import json

import pytest
from written_text import TEXTS, jsonl, parquet_bytes, read, refusal_of, write

ROWS = jsonl([{"text": text} for text in TEXTS])
LICENCE = "Permission is hereby granted, free of charge, to any person.\n" * 200
INFOS = json.dumps({"default": {"features": {"text": {"dtype": "string"}}}}, indent=2)


@pytest.mark.parametrize(
    "data",
    [("data.jsonl", ROWS), ("z.json", json.dumps([{"text": text} for text in TEXTS]))],
    ids=["lines", "array"],
)
@pytest.mark.parametrize(
    "others",
    [
        {"LICENSE.txt": LICENCE},
        {"README.md": LICENCE, "LICENSE": LICENCE, "NOTICE.txt": LICENCE},
        {"dataset_infos.json": INFOS, "a_infos.json": INFOS, "requirements.txt": "datasets\n"},
        {"about.json": INFOS, "notes.txt": "x", "zz.json": '{"version": 3}'},
        {"a.txt": "x", "b.txt": "y", "c.txt": "z", "d.md": LICENCE},
        {"script.py": "pass\n" * 1000, "picture.png": b"\x89PNG" * 1000},
    ],
    ids=["licence", "readme", "infos", "descriptions", "more files", "unknown"],
)
def test_the_data_of_a_folder_are_read_and_not_what_lies_beside_them(
    tmp_path, data, others, caplog
):
    write(tmp_path / data[0], data[1])
    for name, content in others.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert read(tmp_path) == TEXTS
    (said,) = caplog.messages
    assert said.endswith(f"left out: {', '.join(sorted(others))}")


def test_of_many_files_left_out_a_few_are_named(tmp_path, caplog):
    write(tmp_path / "data.jsonl", ROWS * 9)
    for number in range(20):
        write(tmp_path / f"{number:02}.txt", "x")
    assert read(tmp_path) == TEXTS * 9
    assert caplog.messages[0].endswith("03.txt, 04.txt, 05.txt and 14 more")


def test_files_about_data_are_data_where_there_is_nothing_else(tmp_path):
    write(tmp_path / "a/LICENSE.txt", "the licence")
    write(tmp_path / "b/notes.md", "a note")
    write(tmp_path / "b/README.md", "about the notes")
    assert read(tmp_path / "a") == ["the licence"]
    assert read(tmp_path / "b") == ["a note"]
    write(tmp_path / "c/about.json", INFOS)
    assert "c/about.json" in refusal_of(tmp_path / "c")


def test_a_named_field_tells_data_from_descriptions(tmp_path):
    write(tmp_path / "a.json", json.dumps({"body": "one document"}))
    write(tmp_path / "b.json", INFOS)
    assert read(f"{tmp_path}#body") == ["one document"]


def test_a_damaged_file_among_the_data_is_refused(tmp_path):
    write(tmp_path / "a.jsonl", ROWS)
    write(tmp_path / "b.json", '{"text": "cut')
    assert "b.json line 1 is not JSON" in refusal_of(tmp_path)


def test_a_table_beside_a_licence_is_read_by_datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    write(tmp_path / "set/data.csv", "n,content\n1,one\n2,two\n")
    write(tmp_path / "set/LICENSE.txt", LICENCE)
    write(tmp_path / "set/a.txt", "x")
    assert read(tmp_path / "set") == ["one", "two"]
    monkeypatch.chdir(tmp_path)
    assert read("set") == ["one", "two"]
    assert "no file whose name says nonsense, but data.csv" in refusal_of(
        f"{tmp_path}/set@nonsense"
    )
    write(tmp_path / "both/a.parquet", parquet_bytes({"text": TEXTS}))
    write(tmp_path / "both/a.csv", "text\nx\n")
    assert read(tmp_path / "both") == TEXTS


def test_links_to_folders_are_followed_and_loops_are_not(tmp_path):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "data"
    elsewhere.mkdir()
    folder.mkdir()
    write(elsewhere / "rows.jsonl", ROWS)
    (folder / "linked").symlink_to(elsewhere)
    (folder / "loop").symlink_to(folder)
    assert read(folder) == TEXTS
