"""Which format a model gets, and what of its context is kept. Oracle: the table of preference."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig

from dotmoe.export.choice import context_note, format_for
from dotmoe.export.format import Feature, features_of_decoder, features_of_split
from dotmoe.export.record import ExportRecord
from dotmoe.measure.report.page import summary
from dotmoe.method.config import ExpertsConfig
from dotmoe.method.granularity import Granularity, splits_of
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.family import family_of
from dotmoe.models.meta_model import meta_model
from dotmoe.run.defaults import experts_with_defaults
from runs import TINY_CONVERT, TinyRun

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
WINDOW = {"sliding_window": 40}
MIXED = {"layer_types": ["full_attention", "sliding_attention"] * 8}
MIXTRAL, GLM4, CUT = ("mixtral", 256), ("glm4_moe", 256), ("glm4_moe", 40)


def described(family, **changes):
    config = AutoConfig.for_model(family, **SIZES | changes)
    family = family_of(config)
    return DenseModel(model=meta_model(config), weights="meta", family=family, source="a model")


@pytest.mark.parametrize(
    ("family", "changes", "options", "expected"),
    [
        ("mistral", WINDOW, {}, MIXTRAL),
        ("phi3", WINDOW, {}, MIXTRAL),
        ("mistral", WINDOW, {"shared": 0.25}, CUT),
        ("mistral", WINDOW, {"first_dense_layers": 1}, CUT),
        ("mistral", WINDOW, {"format": "glm4_moe"}, CUT),
        ("cwm", WINDOW | MIXED, {}, CUT),  # is lost anyway
        ("mistral", {"sliding_window": 256}, {}, GLM4),
        ("mistral", {"sliding_window": None}, {}, GLM4),
        ("llama", {}, {}, GLM4),
    ],
)
def test_defaults_cost_no_context_but_what_is_asked_for_does(family, changes, options, expected):
    """A shared expert and dense layers are taken by default only where the context stays."""
    dense, name = described(family, **changes), options.get("format", "auto")
    given = {key: value for key, value in options.items() if key != "format"}
    experts = experts_with_defaults(ExpertsConfig(**given), dense, name, torch.float32)
    is_open = experts.first_dense_layers is None
    for first in (0, 1) if is_open else (experts.first_dense_layers,):
        chosen = replace(experts, first_dense_layers=first)
        splits = splits_of(chosen, dense.widths.ffn, 4)
        form = format_for(dense, splits, name, torch.float32)
        assert (form.name, form.context(dense)) == expected
        note = context_note(dense, splits, form, torch.float32)
        assert bool(note) == (expected == CUT)
        if note and family == "mistral":
            assert "With --shared 0 --first-dense-layers 0 --format auto it is 256" in note
        elif note:
            assert "With --format dotmoe it stays" in note
    assert (experts.shared == 0) == (expected == MIXTRAL)
    assert is_open == (expected != MIXTRAL and "first_dense_layers" not in options)


def test_what_an_export_loses_of_its_context_is_the_last_that_a_conversion_says(
    tiny_dense, text_file, tmp_path
):
    model = tiny_dense("phi3", sliding_window=32)
    options = {"data": text_file, **TINY_CONVERT, "steps": 0, "seq_len": 32}
    said = {}
    for shared in (0.0, 1 / 12):
        folder = TinyRun("convert", model, tmp_path / str(shared), options | {"shared": shared})
        console = Console(width=1000, file=io.StringIO())
        console.print(summary(folder.made().folder))
        said[shared] = console.file.getvalue()
        record = ExportRecord.load(folder.folder / "5_export")
        assert ("lowered from 256 to 32" in said[shared]) == bool(shared)
        assert (record.context_lowered in record.notes) == bool(shared)
    assert "give" not in said[0.0]
    assert "it is 256, as mixtral" in said[1 / 12]


def test_features_are_those_of_the_model_and_of_the_split():
    assert features_of_decoder(described("llama")) == set()
    biased = described("llama", attention_bias=True, head_dim=32)
    assert features_of_decoder(biased) == {Feature.ALL_BIASES, Feature.OWN_HEAD_DIM}
    norms = {Feature.NORMS_OVER_HEADS, Feature.NORMS_AFTER}
    assert features_of_decoder(described("olmo2")) == norms
    assert features_of_decoder(described("qwen2")) == {Feature.QKV_BIASES}
    split = Granularity(num_experts=8, expert_size=16, active_experts=2)
    assert features_of_split((split,)) == set()
    shared = replace(split, shared_size=16, first_dense_layers=1)
    assert features_of_split((shared,)) == {Feature.SHARED_EXPERT, Feature.DENSE_LAYERS}
    heads = replace(split, target="attention")
    assert features_of_split((split, heads)) == {Feature.EXPERTS_OF_HEADS}
