"""Stage tokenise. Oracle: `pack` on the whole text."""

import json
from types import SimpleNamespace

import pytest
import torch

from dotmoe.data import DataConfig, TokenBlocks, documents, pack
from dotmoe.errors import UserError
from dotmoe.load import LoadConfig, load_dense
from dotmoe.options import check
from dotmoe.progress import Progress
from dotmoe.self_text import SampleConfig
from dotmoe.tokenise import Text, require_sources, tokenise


class Said(Progress):
    def __init__(self):
        super().__init__(quiet=True)
        self.lines = []

    def log(self, text):
        self.lines.append(text)


@pytest.fixture(scope="module")
def dense(tiny_dense):
    return load_dense(str(tiny_dense("llama")), LoadConfig(device="cpu"))


@pytest.fixture
def text(tmp_path):
    lines = [json.dumps({"text": f"{i}: the crow ate {i * 7 % 13} figs."}) for i in range(300)]
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def tokenised(dense, tmp_path):
    """Runs the stage: the text, its record, and what was said."""

    def make(*data, blocks=30_000, eval_text=(), beside=None, sample=None, **options):
        config = DataConfig(data=data, **{"seq_len": 32} | options)
        check(config)
        require_sources(config, eval_text)
        folder, progress = tmp_path / "0_data", Said()
        folder.mkdir(exist_ok=True)
        made = tokenise(
            config,
            sample or SampleConfig(),
            dense,
            folder,
            blocks=blocks,
            eval_text=eval_text,
            eval_tokens=300,
            progress=progress,
            beside=beside,
        )
        record = json.loads((folder / "data.json").read_text())
        left = {path.name for path in folder.iterdir()}
        assert left == {"training.safetensors", "heldout.safetensors", "data.json"}
        assert torch.equal(Text.load(folder).training.tokens_BT, made.training.tokens_BT)
        return SimpleNamespace(text=made, record=record, said=progress.lines)

    return make


def test_the_last_blocks_are_kept_apart(text, dense, tokenised):
    made = tokenised(text)
    training, heldout = made.text.training.tokens_BT, made.text.heldout.tokens_BT
    expected = pack(documents(DataConfig(data=(text,))), dense.tokenizer).tokens
    both = torch.cat([training, heldout]).flatten()
    assert len(heldout) == 10
    assert torch.equal(both, expected[: len(both)])
    assert len(expected) - len(both) < 32
    assert made.record["training"]["boundaries"]["separator"] == "<s> before each"
    assert made.text.heldout_name == ("blocks of the data kept out of training",)


def test_text_to_measure_on_is_read_in_order_and_unmixed(text, dense, tokenised):
    made = tokenised(text, text, eval_text=(text,), data_weights=(1.0, 1.0), shuffle_buffer=9)
    expected = pack(documents(DataConfig(data=(text,))), dense.tokenizer, 256).tokens
    assert torch.equal(made.text.heldout.tokens_BT, expected[None])
    assert made.text.heldout_name == (text,)
    assert len(made.record["training"]["sources"]) == 2


def test_the_model_itself_may_be_the_source(tokenised):
    made = tokenised("self", sample=SampleConfig(sample_tokens=400))
    training, heldout = made.text.training, made.text.heldout
    assert (training.num_blocks, heldout.num_blocks) == (12, 10)
    assert training.tokens_BT[:, 0].unique().tolist() == [0]
    assert made.record["training"]["sources"][0]["name"] == "self"
    assert "the dense model itself sampled" in made.text.heldout_name[0]


def test_beside_a_run_its_heldout_text_is_taken_with_its_name(text, tokenised):
    """Also where the training text is another, such as samples, of which as many as it asks for."""
    source = tokenised(text).text
    source = Text(
        training=source.training,
        heldout=TokenBlocks(source.heldout.tokens_BT.clone()),
        heldout_name=("a name",),
    )
    made = tokenised("self", beside=source, sample=SampleConfig(sample_tokens=400))
    assert made.text.heldout_name == ("a name",)
    assert torch.equal(made.text.heldout.tokens_BT, source.heldout.tokens_BT)
    assert made.text.training.num_tokens <= 400 + source.heldout.num_tokens + 32
    made = tokenised(text, beside=source)
    assert made.record["left_out_blocks"] >= 9
    assert any("left out" in line for line in made.said)


def test_a_lowered_block_length_is_said(text, tokenised):
    made = tokenised(text, seq_len=512)
    assert made.text.training.seq_len == 256
    assert made.said == ["seq_len lowered to 256: the model has no longer context"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_weights": (1.0, 0.0)}, "data_weights is 0.0, but it must be above 0"),
        ({"data_weights": (1.0, float("nan"))}, "data_weights is nan"),
        ({"data_epochs": 0}, "data_epochs is 0"),
        ({"data_epochs": 3}, "only the sources of a mix are repeated"),
        ({"shuffle_buffer": -1}, "shuffle_buffer is -1"),
        ({"seq_len": 1}, "seq_len is 1, but it must be at least 2"),
    ],
)
def test_refuses_options_that_no_text_can_use(options, message):
    with pytest.raises(UserError, match=message):
        check(DataConfig(data=("a", "b"), **options))
