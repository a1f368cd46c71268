"""What rows say: oracles are the same rows as plain strings, and templates that print all."""

import json
import re
import tracemalloc

import pytest
from written_text import documents_of, jsonl, parquet_bytes, read, refusal_of, write

from dotmoe.text.config import DataConfig
from dotmoe.text.files import PIECE_CHARACTERS, cut, whole_documents
from dotmoe.text.rows import Chat, Document, content_of
from dotmoe.text.sources import documents, opened
from runs import refusal


class Printing:
    """A tokenizer whose template prints whatever it is given, as many of them do."""

    chat_template, bos_token = "{{ messages }}", None

    @staticmethod
    def apply_chat_template(messages, tokenize, add_generation_prompt):
        assert not tokenize
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages)


def chats(path):
    return [each.text for each in documents(DataConfig(data=(str(path),)), Printing)]


TURNS = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me, 1 🙂"}]
WRITTEN = "user: Who?\nassistant: Me, 1 🙂\n"


# --- which field counts


@pytest.mark.parametrize("empty", [None, "", " \n"])
@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_a_field_that_says_nothing_gives_way_to_the_next(tmp_path, empty, ending):
    rows = [{"text": empty, "page": "a"}, {"text": "b", "page": None}, {"text": empty, "page": ""}]
    columns = {name: [row[name] for row in rows] for name in ("text", "page")}
    contents = {"jsonl": jsonl(rows), "json": json.dumps(rows), "parquet": parquet_bytes(columns)}
    assert read(write(tmp_path / f"a.{ending}", contents[ending])) == ["a", "b", ""]


def test_the_rows_of_two_corpora_are_all_read(tmp_path):
    rows = [{"text": None, "messages": TURNS}, {"text": "plain", "messages": None}]
    rows += [{"text": "", "messages": TURNS}, {"text": "more", "messages": []}]
    expected = [WRITTEN, "plain", WRITTEN, "more"]
    assert chats(write(tmp_path / "a.jsonl", jsonl(rows))) == expected
    table = {name: [row[name] for row in rows] for name in ("text", "messages")}
    assert chats(write(tmp_path / "a.parquet", parquet_bytes(table))) == expected
    only_chats = [{"text": None, "messages": TURNS}] * 2
    assert chats(write(tmp_path / "b.jsonl", jsonl(only_chats))) == [WRITTEN] * 2


def test_of_two_full_fields_the_first_counts_and_this_is_said_once(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", jsonl([{"page": "p", "text": "t", "content": "c"}] * 3))
    assert read(path) == ["t"] * 3
    (said,) = caplog.messages
    assert f"{path}: rows say something in text and in content, page; text is read" in said
    assert read(f"{path}#page") == ["p"] * 3
    assert len(caplog.messages) == 1
    asking = write(tmp_path / "b.jsonl", jsonl([{"prompt": "Why?", "text": "t"}]))
    assert read(asking) == ["t"]
    assert "rows say something in text and in prompt; text is read" in caplog.text


# --- chats


SHAREGPT = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me, 1 🙂"}]
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "W"}, {"type": "text", "text": "ho?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Me, 1 🙂"}]},
]
ALPACA = {"instruction": "Add.", "input": "1, 2", "output": "3"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TURNS},
        {"conversations": SHAREGPT},
        {"messages": PARTS},
        {"conversations": [{**m, "weight": None, "tool_calls": None} for m in TURNS]},
        TURNS,
        SHAREGPT,
    ],
    ids=["messages", "from and value", "parts", "null keys", "list", "list, from and value"],
)
def test_a_chat_in_any_of_the_usual_forms_is_rendered_alike(tmp_path, row):
    several = [row, row]
    for name, content in {
        "lines.jsonl": jsonl(several),
        "array.json": json.dumps(several, indent=1),
        "one.json": json.dumps([row]),
    }.items():
        found = chats(write(tmp_path / name, content))
        assert found == [WRITTEN] * (1 if name == "one.json" else 2)
    if isinstance(row, list):
        assert chats(write(tmp_path / "one.json", json.dumps(row))) == [WRITTEN]


def test_an_alpaca_row_is_a_chat_of_two_turns(tmp_path):
    rows = [ALPACA, {**ALPACA, "input": ""}, {**ALPACA, "system": "Count.", "history": []}]
    asked = "user: Add.\n\n1, 2\nassistant: 3\n"
    expected = [asked, "user: Add.\nassistant: 3\n", f"system: Count.\n{asked}"]
    assert chats(write(tmp_path / "a.jsonl", jsonl(rows))) == expected
    columns = {name: [ALPACA[name]] for name in ALPACA}
    assert chats(write(tmp_path / "a.parquet", parquet_bytes(columns))) == [asked]
    assert "line 1 is a chat, but text is needed" in refusal_of(tmp_path / "a.jsonl")


def test_a_row_is_read_apart_from_its_rendering():
    assert content_of({"messages": PARTS}, "row 1") == Chat(tuple(TURNS))
    assert content_of({"text": " ", "page": "x"}, "row 1") == "x"
    assert content_of({"messages": [{"role": "user", "content": ""}]}, "row 1") is None


def one(message):
    return {"messages": [*TURNS, message]}


IMAGE = {"type": "image_url", "image_url": {"url": "x.png"}}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (one({"role": "user", "content": [IMAGE]}), "message 3 .* has a part of type image_url"),
        (one({"role": "user", "content": ["x"]}), "has a part of type str, and only text"),
        (one({"role": "user", "content": [{"type": "text"}]}), "has a part of type text"),
        (one({"role": "user", "content": 3}), "has a content that is int, not text"),
        (one({"role": "user", "content": {"a": 1}}), "has a content that is dict, not text"),
        (one({"role": "user", "content": None}), "message 3 .* has no content; it has role"),
        (one({"role": "user", "text": "x"}), "has no content; it has role, text"),
        (one({"role": "user", "parts": ["x"]}), "has no content; it has role, parts"),
        (one({"content": "x"}), "message 3 .* has no role; it has content"),
        (one({"role": None, "content": "x"}), "has no role"),
        (one({"role": 1, "content": "x"}), "has no role"),
        (one("x"), "item 3 is str"),
        (one({"from": "narrator", "value": "x"}), "is from 'narrator', but system, human"),
        (one({"from": "gpt", "value": None}), "has no content"),
        (one({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}), "tool calls,"),
        (
            one({"role": "assistant", "tool_calls": [{"function": {"name": "user"}}]}),
            "has tool calls, which the model's chat template does not write",
        ),
        ({"messages": json.dumps(TURNS)}, "is text, not a list of messages"),
        ({"messages": {"role": ["user"], "content": ["x"]}}, "is dict, not text"),
        ({"role": "user", "content": "x"}, "is one message of a chat"),
        ({**ALPACA, "history": [["a", "b"]]}, "'history' in .* is list, not text"),
        ({**ALPACA, "output": 3}, "'output' in .* is int, not text"),
        ({"input": "x"}, "has no field of text, .*, nor instruction and output; it has input"),
        ({"text": 3, "messages": TURNS}, "'text' in .* is int, not text"),
        ({"text": "a\0b"}, "holds the character NUL"),
        (["a"], "is not a JSON object, nor a list of messages"),
    ],
)
def test_what_a_template_would_print_wrongly_is_refused_with_its_row(tmp_path, row, words):
    path = write(tmp_path / "a.jsonl", jsonl([{"text": "first"}, row]))
    said = refusal(chats, path)
    assert f"{path} line 2" in said
    assert "\n" not in said
    assert re.search(words, said), said


def test_tool_calls_that_a_template_writes_need_no_content(tmp_path):
    class Calling(Printing):
        @staticmethod
        def apply_chat_template(messages, tokenize, add_generation_prompt):
            return str([(m["role"], m["content"], m.get("tool_calls")) for m in messages])

    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    path = write(tmp_path / "a.jsonl", jsonl([one(call)]))
    (document,) = documents(DataConfig(data=(str(path),)), Calling)
    assert "'assistant', '', [{'function'" in document.text


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", ["tools", "system", "completion"])
def test_what_stands_beside_messages_and_is_not_read_is_said(name, kind, tmp_path, caplog):
    asking = {"prompt": "Add."} if name == "completion" else {"messages": TURNS}
    rows = [{**asking, name: "3"}, {**asking, name: None}]
    content = jsonl(rows)
    if kind == "parquet":
        content = parquet_bytes({column: [row[column] for row in rows] for column in rows[0]})
    path = write(tmp_path / f"{name}.{kind}", content)
    first, second = chats(path)
    assert first == second
    assert f"rows have {name} beside their messages, which is not read" in caplog.text


def test_what_a_template_leaves_out_is_said(tmp_path, caplog):
    class UserOnly(Printing):
        @staticmethod
        def apply_chat_template(messages, tokenize, add_generation_prompt):
            return "".join(m["content"] for m in messages if m["role"] == "user")

    path = write(tmp_path / "a.jsonl", jsonl([{"messages": TURNS}] * 2))
    rendered = Document("Who?", is_rendered=True)
    assert list(documents(DataConfig(data=(str(path),)), UserOnly)) == [rendered] * 2
    (said,) = caplog.messages
    assert "leaves out or changes what messages of role assistant say" in said


# --- encodings


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.jsonl", "a.json", "a.jsonl.gz"])
@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_another_encoding_is_refused_by_its_name(tmp_path, encoding, marked, name):
    content = jsonl([{"text": "A cat sat on the mat, été."}])
    content = ("\ufeff" * marked + content).encode(encoding)
    said = refusal_of(write(tmp_path / name, content))
    assert encoding[:6].upper() in said
    assert "convert it" in said
    assert "\n" not in said


@pytest.mark.parametrize("at", [100, 3_000_000])
def test_nul_bytes_anywhere_are_no_text(tmp_path, at):
    path = write(tmp_path / "a.txt", b"x" * at + b"\0" + b"y" * 100)
    assert "holds NUL bytes" in refusal_of(path)


def test_a_byte_order_mark_of_utf8_is_no_text_in_any_format(tmp_path):
    mark = "\ufeff"
    for name, content in {
        "a.txt": "hello",
        "a.jsonl": jsonl([{"text": "hello"}]),
        "a.json": '[{"text": "hello"}]',
    }.items():
        assert read(write(tmp_path / name, mark + content)) == ["hello"]


# --- arrays, and memory


@pytest.mark.parametrize("part", [1, 2, 7, 1 << 20])
def test_an_array_is_read_alike_in_parts_of_any_size(tmp_path, part, monkeypatch):
    monkeypatch.setattr("dotmoe.text.files._READ_CHARACTERS", part)
    texts = ["", 'a "quoted\\" one', "é 🙂", "x" * 50, "[{]}, "]
    rows = [{"n": -1.5e-3, "l": [True, None, {}], "text": text} for text in texts]
    for indent in (None, 2):
        for ascii_only in (True, False):
            content = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
            assert read(write(tmp_path / "a.json", f"\n {content}\n ")) == texts
    assert "is empty" in refusal_of(write(tmp_path / "b.json", "[]"))


@pytest.mark.parametrize(
    "content",
    ['[{"text": "a"}', '[{"text": "a}]', '[{"text": "a"} {"text": "b"}]', "[nope]", "[" * 10**5],
)
def test_an_array_that_is_damaged_is_refused(tmp_path, content):
    said = refusal_of(write(tmp_path / "a.json", content))
    assert "is not JSON in UTF-8" in said
    assert "\n" not in said


def test_a_long_text_comes_in_the_pieces_of_the_whole(tmp_path):
    text = "".join(f"line {n}\n\n  of some text é\n" for n in range(200_000))
    parts = documents_of(write(tmp_path / "a.txt", text))
    assert [part.text for part in parts] == list(cut(text))
    assert max(len(part.text) for part in parts) <= PIECE_CHARACTERS
    assert list(whole_documents(parts)) == [Document(text)]
    before, whole, after = Document("a"), Document(text), Document("b")
    assert list(whole_documents([before, *parts, after])) == [before, whole, after]


def test_objects_over_several_lines_are_rows_of_a_json_file(tmp_path):
    rows = [{"text": "a"}, {"text": "b", "more": {"x": [1]}}]
    spread = "\n".join(json.dumps(row, indent=2) for row in rows)
    assert read(write(tmp_path / "a.json", spread)) == ["a", "b"]
    whole_set = json.dumps({"data": rows}, indent=2)
    said = refusal_of(write(tmp_path / "b.json", whole_set))
    assert "b.json row 1 has no field of text" in said
    assert "it has data." in said


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.json"])
def test_memory_does_not_grow_with_a_file(tmp_path, name):
    """The bound is a quarter of the file, and there is no row of more than 10 kB in it."""
    row, rows = "the quick brown fox jumps\n" * 400, 3_000
    content = row * rows
    if name == "a.json":
        content = json.dumps([{"text": row}] * rows)
    size = len(content)
    path = write(tmp_path / name, content)
    del content
    tracemalloc.start()
    try:
        total = sum(len(each.text) for each in documents(DataConfig(data=(str(path),))))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total == len(row) * rows
    assert peak < size / 4


@pytest.mark.parametrize(
    "columns",
    [
        {"role": ["user", "assistant"], "content": ["Two and two?", "Four."]},
        {"from": ["human", "gpt"], "value": ["Two?", "2"], "text": ["", ""]},
    ],
)
def test_parquet_of_single_messages_is_refused_as_json_is(columns, tmp_path):
    table = write(tmp_path / "rows.parquet", parquet_bytes(columns))
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    lines = write(tmp_path / "rows.jsonl", jsonl(rows))
    for path in (table, lines):
        assert "is one message of a chat" in refusal_of(path)


# --- rows that ask


def asked_in(path):
    return list(opened(str(path), DataConfig(data=(str(path),)), Printing, answered=True))


@pytest.mark.parametrize("bad", ["broken \ud800 half", "a \0 byte"])
@pytest.mark.parametrize("name", ["prompt", "messages"])
def test_what_is_no_text_in_a_question_is_refused_as_in_text(tmp_path, name, bad):
    value = bad if name == "prompt" else [{"role": "user", "content": bad}]
    file = tmp_path / "ask.jsonl"
    file.write_text(json.dumps({name: value}) + "\n")
    said = refusal(asked_in, file)
    assert "row 1" in said or "line 1" in said
    assert "Unicode" in said or "NUL" in said


def test_a_question_has_line_ends_of_text_mode_and_a_blank_one_is_left_out(tmp_path):
    file = tmp_path / "ask.jsonl"
    rows = [{"prompt": ""}, {"prompt": "One\r\ntwo\rthree"}, {"prompt": None}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asking = [each for each in asked_in(file) if not each.says_nothing]
    assert [each.messages[0]["content"] for each in asking] == ["One\ntwo\nthree"]
