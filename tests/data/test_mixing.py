"""Weighted mixes. Oracle: each source tokenised alone, and the shares counted at every moment."""

import json
import random

import pytest
import torch
from written_text import jsonl, write

from dotmoe.data import DataConfig, pack, pack_sources, shares_in_words
from dotmoe.data.packing import Reading, mixed
from dotmoe.data.sources import MIXES, documents, opened, shuffled, sources_of
from dotmoe.errors import UserError


def folk(sign, count, longest, seed):
    """Documents that are told apart by the one sign they consist of."""
    draws = random.Random(seed)
    return [sign * draws.randint(1, longest) for _ in range(count)]


@pytest.fixture
def three(tmp_path):
    """Sources a, b and c with documents of quite different lengths."""
    shapes = {"a": (400, 50), "b": (40, 900), "c": (900, 20)}
    return [
        str(write(tmp_path / f"{sign}.jsonl", jsonl([{"text": t} for t in folk(sign, *shape, 7)])))
        for sign, shape in shapes.items()
    ]


def packed(config, tokenizer, tmp_path, max_tokens=10**9):
    return pack_sources(config, tokenizer, tmp_path / "out.safetensors", max_tokens)


@pytest.mark.parametrize("tokenizer_name", ["with_bos", "without_bos"])
@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (1, 30, 9), (5, 5, 5)])
def test_the_share_of_tokens_follows_the_weights_at_every_moment(
    tokenizer_name, weights, three, request
):
    tokenizer = request.getfixturevalue(tokenizer_name)
    config = DataConfig(data=tuple(three), data_weights=weights)
    shares = [weight / sum(weights) for weight in weights]
    longest = [902, 902, 902]
    readings = [
        Reading(n, share, config, tokenizer) for n, share in zip(three, shares, strict=True)
    ]
    counts, sizes, moments = [0, 0, 0], [0, 0, 0], 0
    for reading, ids in mixed(readings, tokenizer):
        if any(one.ran_out for one in readings):
            break
        index = readings.index(reading)
        counts[index] += len(ids)
        sizes[index] = max(sizes[index], len(ids))
        total, moments = sum(counts), moments + 1
        for count, share, size in zip(counts, shares, longest, strict=True):
            assert -share * sum(longest) <= count - share * total <= size
    assert moments > 40
    assert max(sizes) > 800


def test_a_mix_holds_whole_documents_in_the_order_of_their_sources(three, with_bos, tmp_path):
    config = DataConfig(data=tuple(three), data_weights=(2, 1, 1), seq_len=2)
    blocks, record = packed(config, with_bos, tmp_path)
    text = with_bos.decode(blocks.tokens_BT.flatten())
    mixed_documents = text.split("<s>")[1:]
    for name, source in zip("abc", record["sources"], strict=True):
        own = [document for document in mixed_documents if document.startswith(name)]
        expected = list(documents(DataConfig(data=(source["name"],))))
        assert own[:-1] == expected[: len(own) - 1]
        assert source["documents"] == len(expected) == len(own)
        # One byte is one token, and one more goes before each document.
        assert source["tokens"] == sum(map(len, expected)) + len(expected)
        assert source["ran_out"] is True
    assert sum(source["tokens"] for source in record["sources"]) == record["tokens"]


def test_without_weights_sources_are_read_in_order_as_pack_does(three, without_bos, tmp_path):
    config = DataConfig(data=tuple(three), seq_len=16)
    blocks, record = packed(config, without_bos, tmp_path)
    expected = pack(documents(config), without_bos).tokens
    assert record["tokens"] == len(expected)
    whole = len(expected) // 16 * 16
    assert torch.equal(blocks.tokens_BT.flatten(), expected[:whole])


def test_the_cut_at_the_wanted_tokens_is_counted(three, with_bos, tmp_path):
    config = DataConfig(data=tuple(three), data_weights=(1, 1, 2), seq_len=10)
    blocks, record = packed(config, with_bos, tmp_path, 2005)
    assert (blocks.num_tokens, record["tokens"]) == (2000, 2005)
    assert sum(source["tokens"] for source in record["sources"]) == 2005
    assert sum(source["share"] for source in record["sources"]) == pytest.approx(1)
    assert json.loads(json.dumps(record)) == record
    again, _ = pack_sources(config, with_bos, tmp_path / "again.safetensors", 2005)
    assert torch.equal(again.tokens_BT, blocks.tokens_BT)


def test_a_source_that_runs_out_leaves_the_others_in_proportion(tmp_path, with_bos):
    files = [
        str(write(tmp_path / f"{sign}.jsonl", jsonl([{"text": sign * 9}] * count)))
        for sign, count in (("a", 10), ("b", 1000), ("c", 1000))
    ]
    config = DataConfig(data=tuple(files), data_weights=(0.5, 0.4, 0.1), seq_len=10)
    blocks, record = packed(config, with_bos, tmp_path, 8000)
    a, b, c = record["sources"]
    assert (a["tokens"], a["passes"], a["ran_out"]) == (100, 1, True)
    assert b["tokens"] / c["tokens"] == pytest.approx(4, rel=0.02)
    assert blocks.num_tokens == 8000
    assert "a.jsonl 1.2% of the tokens (asked 50.0%), ran out after 100" in shares_in_words(record)
    thrice = DataConfig(data=tuple(files), data_weights=(0.5, 0.4, 0.1), seq_len=10, data_epochs=3)
    a, *_ = packed(thrice, with_bos, tmp_path, 8000).record["sources"]
    assert (a["tokens"], a["passes"], a["ran_out"]) == (300, 3, True)


def test_a_long_document_is_mixed_piece_by_piece(tmp_path, with_bos):
    long = write(tmp_path / "long.txt", "a line\n" * 40_000)
    short = write(tmp_path / "short.jsonl", jsonl([{"text": "b" * 99}] * 3000))
    config = DataConfig(data=(str(long), str(short)), data_weights=(1, 1), seq_len=64)
    blocks, record = packed(config, with_bos, tmp_path)
    half = blocks.tokens_BT.flatten()[: 2 * 100_000]
    share = float((half == with_bos.encode("b")[-1]).float().mean())
    assert share == pytest.approx(0.5, abs=0.2)
    assert record["sources"][0]["documents"] == 1
    text = with_bos.decode(blocks.tokens_BT.flatten())
    pieces = [piece for piece in text.split("<s>") if piece.startswith("a")]
    assert len(pieces) > 3
    assert "".join(pieces) == "a line\n" * 40_000


def test_each_source_may_have_a_field_of_its_own(tmp_path, with_bos):
    one = write(tmp_path / "one.jsonl", jsonl([{"text": "no", "question": "aaaa"}] * 20))
    two = write(tmp_path / "two.jsonl", jsonl([{"text": "bbbb"}] * 20))
    config = DataConfig(data=(f"{one}#question", str(two)), data_weights=(1, 1), seq_len=5)
    blocks, _ = packed(config, with_bos, tmp_path)
    rows = {with_bos.decode(row) for row in blocks.tokens_BT}
    assert rows == {"<s>aaaa", "<s>bbbb"}


def test_a_data_set_may_have_a_split_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder / "train.jsonl", jsonl([{"body": "a"}]))
    write(folder / "test.jsonl", jsonl([{"body": "b"}]))
    config = DataConfig(data=("x",))
    assert list(opened(f"{folder}#body", config)) == ["a"]
    assert list(opened(f"{folder}@test#body", config)) == ["b"]


# --- named mixes


def test_dolmino_is_read_from_a_copy_by_its_proportions(tmp_path, with_bos, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for sign, part in zip("abcdef", MIXES["dolmino"].percent_of_part, strict=True):
        folder = tmp_path / "copy" / "data" / part
        folder.mkdir(parents=True)
        write(folder / "x.jsonl", jsonl([{"id": 1, "text": t} for t in folk(sign, 300, 40, 3)]))
    config = DataConfig(data=(f"dolmino:{tmp_path / 'copy'}",), seq_len=16)
    blocks, record = packed(config, with_bos, tmp_path, 6000)
    assert len(record["sources"]) == 6
    for source, percent in zip(
        record["sources"], MIXES["dolmino"].percent_of_part.values(), strict=True
    ):
        assert source["share"] == pytest.approx(percent / 100, abs=41 / 6000 * 2)
    assert len(blocks.tokens_BT.unique()) == 7
    (tmp_path / "copy" / "data" / "wiki" / "x.jsonl").unlink()
    (tmp_path / "copy" / "data" / "wiki").rmdir()
    with pytest.raises(UserError, match="has no folder wiki"):
        packed(config, with_bos, tmp_path, 6000)


def test_dolmino_on_the_hub_is_its_configurations(three):
    alone = sources_of(DataConfig(data=("dolmino",)))
    assert (alone[0][0], len(alone)) == ("allenai/dolmino-mix-1124:dclm", 6)
    parts = sources_of(DataConfig(data=("dolmino", three[0]), data_weights=(3, 1)))
    assert sum(share for _, share in parts) == pytest.approx(1)
    assert parts[-1] == (three[0], 0.25)
    assert parts[0][1] == pytest.approx(0.75 * 0.472, abs=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"data": ("a", "b"), "data_weights": (1.0,)}, "1 numbers for 2 sources"),
        ({"data": ("dolmino", "b")}, "dolmino is a mix itself. Give data_weights"),
        ({"data": ("self", "b")}, "cannot be mixed"),
        ({"data": ("nowhere.txt",), "data_weights": (1.0,)}, "nowhere.txt does not exist"),
    ],
)
def test_refuses_a_mix_that_makes_no_sense(config, message, with_bos, tmp_path):
    with pytest.raises(UserError, match=message) as caught:
        packed(DataConfig(**config), with_bos, tmp_path, 5000)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["self", "dolmino"])
def test_refuses_to_measure_on_what_is_for_training(name):
    with pytest.raises(UserError, match="train"):
        documents(DataConfig(data=(name,)))


# --- shuffling


def test_a_shuffle_buffer_keeps_every_document_and_depends_on_its_seed():
    texts = [str(number) for number in range(500)]
    orders = [list(shuffled(iter(texts), 50, seed)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    for order in orders:
        assert sorted(order, key=int) == texts
        # Nothing can come out before it went in.
        assert all(int(text) <= place + 50 for place, text in enumerate(order))
    assert list(shuffled(iter(texts), 0, 0)) == texts


def test_shuffled_sources_have_another_order_in_each_pass(tmp_path):
    path = str(write(tmp_path / "a.jsonl", jsonl([{"text": str(n)} for n in range(90)])))
    config = DataConfig(data=(path,), shuffle_buffer=30)
    first, again, second = (list(opened(path, config, epoch)) for epoch in (0, 0, 1))
    assert first == again != second
    assert sorted(first) == sorted(second)


def test_too_little_text_is_refused_and_leaves_no_file(tmp_path, with_bos):
    path = write(tmp_path / "a.txt", "12345")
    with pytest.raises(UserError, match="has 6 tokens, but one block of 16"):
        packed(DataConfig(data=(str(path),), seq_len=16), with_bos, tmp_path)
    assert not list(tmp_path.glob("out*"))
