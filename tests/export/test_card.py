"""Record and card of an export."""

import json
import re
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

from dotmoe.common.errors import UserError
from dotmoe.common.files import write_json
from dotmoe.common.tables import Table
from dotmoe.export.parameters import count_parameters
from dotmoe.export.record import RECORD_FILE, ExportRecord, write_model_card
from runs import weights_of


def test_the_card_says_what_it_is_and_how_to_use_it(exported):
    made = exported(out="5_export")
    dense, record, folder = made.dense, made.record, made.folder
    text = (folder / "README.md").read_text()
    card = ModelCard(text)
    assert card.data.library_name == "transformers"
    assert {"dotmoe", "moe", "glm4_moe"} <= set(card.data.tags)
    assert card.data.base_model is None  # a local folder is no hub name
    for words in ("3 of 12 experts", "25.0% of the FFN", f"{record.total_bytes:,} bytes"):
        assert words in text
    assert "5_export" not in text
    assert ".partial" not in text
    total = sum(parameter.numel() for parameter in dense.model.parameters())
    routers, active = 2 * 12 * 64, total - 3 * 64 * 96 * 2 * 9 // 12
    assert record.parameters == {
        "dense": total,
        "stored": total + routers,
        "active": active,
        "active_with_routers": active + routers,
        "active_without_embeddings": active - 2 * 264 * 64,
        "written": sum(tensor.numel() for tensor in weights_of(folder).values()),
    }
    assert all(f"{count:,}" in text for count in record.parameters.values())
    table = Table(columns=("model", "perplexity"), rows=[["a | b", "12.346"]], note="Text: b.txt.")
    write_model_card(folder, record, table)
    expected = "| model | perplexity |\n| --- | ---: |\n| a \\| b | 12.346 |\n\nText: b.txt."
    assert f"## Results\n\n{expected}\n" in (folder / "README.md").read_text()


def test_a_finetuned_export_names_the_model_that_the_work_began_with(exported, dense):
    origin = replace(dense, source="some-one/Model-1B@0123abc", revision="0123abc")
    made = exported(dense, origin=origin)
    card = ModelCard((made.folder / "README.md").read_text())
    assert (made.record.source, made.record.revision) == ("some-one/Model-1B", "0123abc")
    assert card.data.base_model == "some-one/Model-1B"
    assert "# Model-1B, 3 of 12 experts" in card.text
    assert "revision 0123abc" in card.text
    assert str(dense.folder) not in card.text


@pytest.mark.parametrize(
    ("family", "target"),
    [("llama", "glm4_moe"), ("qwen3_5_text", "qwen3_5_moe_text"), ("granite", "granitemoe")],
)
def test_what_the_card_keeps_from_quantisation_is_routers_and_head(family, target, exported):
    made = exported(family, format=target)
    (note,) = [note for note in made.record.notes if "ignore=" in note]
    patterns = json.loads(re.search(r"`ignore=(.*?)`", note)[1])
    names = {name.removesuffix(".weight") for name in weights_of(made.folder)}
    kept = {
        name
        for name in names
        for each in patterns
        if (re.match(each[3:], name) if each.startswith("re:") else each == name)
    }
    last = {"gate", "shared_expert_gate", "layer", "lm_head"}
    assert kept == {name for name in names if name.rpartition(".")[2] in last}
    assert len(kept) == 1 + made.dense.widths.layers * (2 if "qwen" in target else 1)


def test_a_record_says_what_another_k_would_make_of_it(exported, dense_of):
    dense = dense_of("llama", num_hidden_layers=3, intermediate_size=120)
    made = exported(dense, {"shared_size": 24, "dense_layers": 1})
    split = replace(made.layout, active_experts=8).granularity
    active = count_parameters(dense.model, dense.family, (split,)).active
    assert made.record.active_at(8) == (pytest.approx(88 / 120), active)
    assert ExportRecord.load(made.folder) == made.record


def test_a_folder_that_dotmoe_did_not_export_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no dotmoe\.json"):
        ExportRecord.load(tmp_path)
    write_json(tmp_path / RECORD_FILE, {"name": "another version"})
    with pytest.raises(UserError, match=r"is not an export record"):
        ExportRecord.load(tmp_path)
