"""Documents joined to one row of tokens, of one source or of a weighted mix.

Oracles: the tokenizer, document by document, and the shares counted at every moment.
"""

import copy
import itertools
import json
import os
import random
from types import SimpleNamespace

import datasets
import pytest
import torch
from written_text import TEXTS, documents_of, jsonl, parquet_bytes, read, write

from dotmoe.common.errors import UserError
from dotmoe.text import blocks, packing
from dotmoe.text.blocks import TokenBlocks
from dotmoe.text.config import DataConfig
from dotmoe.text.packing import joined, pack, pack_sources, source_record, tokenised
from dotmoe.text.rows import Document
from dotmoe.text.sources import documents, sources_of
from runs import refusal


def folk(sign, count, longest, seed):
    """Documents that are told apart by the one sign they consist of."""
    draws = random.Random(seed)
    return [{"text": sign * draws.randint(1, longest)} for _ in range(count)]


@pytest.fixture(scope="session")
def with_bos(dense_of):
    return dense_of("llama").tokenizer


@pytest.fixture
def three(tmp_path):
    """Sources a, b and c with documents of quite different lengths."""
    shapes = {"a": (400, 50), "b": (40, 900), "c": (900, 20)}
    return tuple(
        str(write(tmp_path / f"{sign}.jsonl", jsonl(folk(sign, *shape, 7))))
        for sign, shape in shapes.items()
    )


@pytest.fixture
def packed(with_bos, tmp_path):
    """Packs sources: the blocks and the record."""

    def make(*data, tokens=10**9, tokenizer=with_bos, seq_len=16, **options):
        config = DataConfig(data=tuple(map(str, data)), seq_len=seq_len, **options)
        path = tmp_path / "out.safetensors"
        record = pack_sources(config, tokenizer, path, tokens)
        assert json.loads(json.dumps(record)) == record
        return TokenBlocks.load(path).tokens_BT, record

    return make


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # with BOS, and without
@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (1, 30, 9), (5, 5, 5)])
def test_the_share_of_tokens_follows_the_weights_at_every_moment(family, weights, three, dense_of):
    tokenizer = dense_of(family).tokenizer
    shares = [weight / sum(weights) for weight in weights]
    records = [source_record(name, share) for name, share in zip(three, shares, strict=True)]
    sources = [(record, tokenised(documents_of(record["name"]), tokenizer)) for record in records]
    counts, moments, longest = [0, 0, 0], 0, 902
    for record, ids, _ in joined(sources, tokenizer):
        if any(one["ran_out"] for one in records):
            break
        counts[records.index(record)] += len(ids)
        total, moments = sum(counts), moments + 1
        for count, share in zip(counts, shares, strict=True):
            assert -share * 3 * longest <= count - share * total <= longest
    assert moments > 40


def test_a_mix_holds_whole_documents_in_the_order_of_their_sources(three, with_bos, packed):
    tokens_BT, record = packed(*three, data_weights=(2, 1, 1), seq_len=2)
    mixed_documents = with_bos.decode(tokens_BT.flatten()).split("<s>")[1:]
    for name, source in zip("abc", record["sources"], strict=True):
        own = [document for document in mixed_documents if document.startswith(name)]
        expected = read(source["name"])
        assert own[:-1] == expected[: len(own) - 1]
        assert source["documents"] == len(expected) == len(own)
        # One byte is one token, and one more goes before each document.
        assert source["tokens"] == sum(map(len, expected)) + len(expected)
        assert source["ran_out"] is True
    assert sum(source["tokens"] for source in record["sources"]) == record["tokens"]


def test_the_cut_at_the_wanted_tokens_is_counted(three, packed):
    tokens_BT, record = packed(*three, data_weights=(1, 1, 2), seq_len=10, tokens=2005)
    assert (tokens_BT.numel(), record["tokens"]) == (2000, 2005)
    assert sum(source["tokens"] for source in record["sources"]) == 2005
    assert sum(source["share"] for source in record["sources"]) == pytest.approx(1)


def test_rows_without_text_are_no_documents_and_are_counted(tmp_path, packed):
    texts = ["a", "", None, " \n", "b"]
    path = write(tmp_path / "a.jsonl", jsonl([{"text": text} for text in texts * 200]))
    tokens_BT, record = packed(path, seq_len=2)
    alone = write(tmp_path / "b.jsonl", jsonl([{"text": text} for text in ["a", "b"] * 200]))
    expected_BT, _ = packed(alone, seq_len=2)
    assert torch.equal(tokens_BT, expected_BT)
    (source,) = record["sources"]
    assert (source["documents"], source["without_text"]) == (400, 600)


def test_a_source_that_runs_out_leaves_the_others_in_proportion(tmp_path, packed):
    a, b, c = (
        write(tmp_path / f"{sign}.jsonl", jsonl([{"text": sign * 9}] * count))
        for sign, count in (("a", 10), ("b", 1000), ("c", 1000))
    )
    options = {"data_weights": (0.3, 0.2, 0.4, 0.1), "seq_len": 10, "tokens": 8000}
    tokens_BT, record = packed(a, a, b, c, **options)  # one named twice is read twice
    first, second, b, c = record["sources"]
    for a in (first, second):
        assert (a["tokens"], a["ran_out"]) == (100, True)
    assert b["tokens"] / c["tokens"] == pytest.approx(4, rel=0.02)
    assert tokens_BT.numel() == 8000


def test_a_long_document_is_mixed_piece_by_piece(tmp_path, with_bos, packed):
    long = write(tmp_path / "long.txt", "a line\n" * 40_000)
    short = write(tmp_path / "short.jsonl", jsonl([{"text": "b" * 99}] * 3000))
    tokens_BT, record = packed(long, short, data_weights=(1, 1), seq_len=64)
    half = tokens_BT.flatten()[: 2 * 100_000]
    share = float((half == with_bos.encode("b")[-1]).float().mean())
    assert share == pytest.approx(0.5, abs=0.2)
    assert record["sources"][0]["documents"] == 1
    text = with_bos.decode(tokens_BT.flatten())
    pieces = [piece for piece in text.split("<s>") if piece.startswith("a")]
    assert len(pieces) > 3
    assert "".join(pieces) == "a line\n" * 40_000


@pytest.mark.parametrize("weights", [(1, 1), (1, 2), (99, 1)])
def test_a_short_mix_of_long_documents_has_its_shares(weights, tmp_path, packed):
    """Each source has more text in one piece than the whole mix takes."""
    names = [write(tmp_path / f"{sign}.txt", f"{sign} line\n" * 9_000) for sign in "ab"]
    tokens_BT, record = packed(*names, data_weights=weights, tokens=16_384)
    assert tokens_BT.numel() == 16_384
    for source, weight in zip(record["sources"], weights, strict=True):
        assert source["share"] == pytest.approx(weight / sum(weights), abs=0.001)


def test_what_a_share_cut_off_comes_if_another_source_runs_out(tmp_path, packed, monkeypatch):
    long = write(tmp_path / "long.txt", "a line\n" * 9_000)
    short = write(tmp_path / "short.txt", "b line\n" * 100)
    mix = {"data_weights": (1, 1), "tokens": 16_384}
    tokens_BT, record = packed(long, short, **mix)
    assert tokens_BT.numel() == 16_384
    first, second = record["sources"]
    assert (second["ran_out"], first["tokens"] + second["tokens"]) == (True, 16_384)
    second_by_piece = SimpleNamespace(monotonic=itertools.count(10**9).__next__)
    monkeypatch.setattr(blocks, "time", second_by_piece)
    real = packing.opened

    def breaking(name, *arguments, **how):
        yield from real(name, *arguments, **how)
        if name == str(short):
            raise KeyboardInterrupt

    monkeypatch.setattr(packing, "opened", breaking)
    with pytest.raises(KeyboardInterrupt):  # the share of the long one is cut off by then
        packed(long, short, **mix)
    monkeypatch.setattr(packing, "opened", real)
    resumed_BT, resumed = packed(long, short, **mix)
    assert torch.equal(resumed_BT, tokens_BT)
    assert resumed == record


@pytest.mark.parametrize(
    ("stop", "family", "weights"),
    [(UserError, "llama", ()), (KeyboardInterrupt, "qwen2", (3, 1, 2))],
)
def test_reading_goes_on_where_it_was_stopped(
    stop, family, weights, three, dense_of, packed, monkeypatch, tmp_path
):
    """Stopped after any number of documents, again and again; what is kept is not tokenised."""
    tokenizer = dense_of(family).tokenizer
    long = write(tmp_path / "long.txt", "a line\n" * 40_000)
    names = (long, *three[:2])
    expected, record = packed(*names, data_weights=weights, tokenizer=tokenizer)
    second_by_piece = SimpleNamespace(monotonic=itertools.count(10**9).__next__)
    monkeypatch.setattr(blocks, "time", second_by_piece)
    real, seen = packing.opened, []

    def breaking(name, *arguments, **how):
        for number, document in enumerate(real(name, *arguments, **how)):
            if breaks[:1] == [number]:
                breaks.pop(0)
                raise stop(f"{name} broke.")
            yield document

    breaks = [2, 130, 131, 399]
    monkeypatch.setattr(packing, "opened", breaking)
    monkeypatch.setattr(
        packing, "tokenised", lambda d, t, skip: seen.append(skip) or tokenised(d, t, skip)
    )
    for _ in range(4):
        with pytest.raises(stop):
            packed(*names, data_weights=weights, tokenizer=tokenizer)
    written, resumed = packed(*names, data_weights=weights, tokenizer=tokenizer)
    assert torch.equal(written, expected)
    assert resumed == record
    assert sum(seen[-3:]) > 300
    breaks.append(300)
    with pytest.raises(stop):
        packed(*names, data_weights=weights, tokenizer=tokenizer)
    write(long, "another line\n" * 3_000)  # what was kept of the text before is not used
    packed(*names, data_weights=weights, tokenizer=tokenizer)
    assert seen[-3:] == [0, 0, 0]
    breaks.append(300)
    with pytest.raises(stop):
        packed(*names, data_weights=weights, tokenizer=tokenizer)
    times = long.stat()
    write(long, "ANOTHER LINE\n" * 3_000)  # nor of one of the same size and time of change
    os.utime(long, ns=(times.st_atime_ns, times.st_mtime_ns))
    packed(*names, data_weights=weights, tokenizer=tokenizer)
    assert seen[-3:] == [0, 0, 0]


def test_dolmino_on_the_hub_is_its_configurations(three):
    alone = sources_of(DataConfig(data=("dolmino",)))
    assert (alone[0][0], len(alone)) == ("allenai/dolmino-mix-1124:dclm", 6)
    parts = sources_of(DataConfig(data=("dolmino", three[0]), data_weights=(3, 1)))
    assert sum(share for _, share in parts) == pytest.approx(1)
    assert parts[-1] == (three[0], 0.25)
    assert parts[0][1] == pytest.approx(0.75 * 0.472, abs=1e-4)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (("dolmino", "b"), {}, "0 numbers, but dolmino, b are a mix of 2"),
        (("nowhere.txt",), {"data_weights": (1.0,)}, "nowhere.txt does not exist"),
        (("{short}",), {}, "has 6 tokens .* too few for a block of 16"),
        (("{short}",), {"tokens": 15}, "has .* tokens .read at most: 15"),
    ],
)
def test_refuses_what_makes_no_block_and_leaves_no_file(data, options, message, packed, tmp_path):
    short = write(tmp_path / "short.txt", "12345")
    with pytest.raises(UserError, match=message) as caught:
        packed(*(name.format(short=short) for name in data), **options)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("out*"))


def test_refuses_to_measure_on_what_is_for_training():
    with pytest.raises(UserError, match="train"):
        documents(DataConfig(data=("dolmino",)))


def test_a_shuffle_buffer_keeps_every_document_and_depends_on_the_seed_of_the_data(tmp_path):
    texts = [str(number) for number in range(500)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")
    orders = [read(tmp_path / "saved", shuffle_buffer=50, data_seed=seed) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order, key=int) == texts for order in orders)
    assert read(tmp_path / "saved", shuffle_buffer=0) == texts


@pytest.mark.parametrize("source", ["a.txt", ".", "python-stdlib"])
def test_a_shuffle_buffer_of_files_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.txt", "x")
    assert f"{source} is read in its own order" in refusal(read, source, shuffle_buffer=2)


# --- packing


def test_documents_are_separated_by_bos_else_eos_else_nothing(with_bos, dense_of, packed, tmp_path):
    without_bos = dense_of("qwen2").tokenizer
    assert without_bos.bos_token_id is None
    bare = copy.deepcopy(without_bos)
    bare.eos_token = None
    plain = [without_bos.encode(text) for text in TEXTS]
    expected = {
        with_bos: [token for ids in plain for token in [0, *ids]],
        without_bos: [token for ids in plain for token in [*ids, 1]],
        bare: [token for ids in plain for token in ids],
    }
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    path = write(tmp_path / "a.jsonl", jsonl([{"text": text} for text in TEXTS]))
    for tokenizer, tokens in expected.items():
        given = map(Document, ["", *TEXTS, ""])  # no trace of empty ones
        flat, tokens_per_byte = pack(given, tokenizer)
        assert (flat.tolist(), flat.dtype) == (tokens, torch.int32)
        assert tokens_per_byte == pytest.approx(len(tokens) / num_bytes)
        in_blocks, record = packed(path, tokenizer=tokenizer, seq_len=2)
        assert record["tokens"] == len(tokens)
        assert in_blocks.flatten().tolist() == tokens[: len(tokens) // 2 * 2]
    with pytest.raises(UserError, match="no text"):
        pack([Document(""), Document("")], with_bos)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_names_of_control_tokens_in_text_are_text(family, dense_of):
    """Oracle: a single character is never the name of a token."""
    tokenizer = dense_of(family).tokenizer
    for name in ("<s>", "</s>", "<|endoftext|>"):
        text = f"an end {name}\n{name}<s"
        (piece,) = tokenised([Document(text)], tokenizer)
        assert piece.ids == [tokenizer.encode(sign)[-1] for sign in text]
    assert tokenizer.encode("</s><|endoftext|>").count(1) == 1  # as it was


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "<s>{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
)


@pytest.mark.parametrize("ending", ["jsonl", "json.gz", "parquet"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_chats_are_rendered_by_the_models_template(family, ending, dense_of, packed, tmp_path):
    tokenizer = copy.deepcopy(dense_of(family).tokenizer)
    chat = [{"role": "user", "content": "</ hi\r\n"}, {"role": "assistant", "content": "yes 🙂"}]
    rows = [{"messages": chat[: 1 + number % 2]} for number in range(9)]
    content = parquet_bytes({"messages": [row["messages"] for row in rows]})
    path = write(tmp_path / f"a.{ending}", content if ending == "parquet" else jsonl(rows))
    message = refusal(packed, path, tokenizer=tokenizer)
    assert "is a chat, but the model has no chat template" in message
    tokenizer.chat_template = TEMPLATE
    tokens_BT, record = packed(path, tokenizer=tokenizer, seq_len=2)
    assert record["sources"][0]["documents"] == 9
    expected = []
    for row in rows:
        plain = [m | {"content": m["content"].replace("\r", "")} for m in row["messages"]]
        expected += tokenizer.apply_chat_template(plain, return_dict=False)
        expected += [] if family == "llama" else [1]
    assert tokens_BT.flatten().tolist() == expected[: tokens_BT.numel()]
    path = write(tmp_path / "b.jsonl", jsonl([{"messages": [{"role": "cook", "content": "x"}]}]))
    message = refusal(packed, path, tokenizer=tokenizer)
    assert "line 1 does not suit the model's chat template (no role cook)" in message
