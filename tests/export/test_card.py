import dataclasses

import pytest
from huggingface_hub import ModelCard

from dotmoe.export import ExportConfig, export, write_model_card
from dotmoe.export.card import card_text


@pytest.fixture
def record_and_folder(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("llama")
    record = export(dense, layout_of(dense), tmp_path / "5_export", ExportConfig(), tokens_BT)
    return record, tmp_path / "5_export", dense


def test_the_card_says_what_it_is_and_how_to_use_it(record_and_folder):
    record, folder, dense = record_and_folder
    text = (folder / "README.md").read_text()
    card = ModelCard(text)
    assert card.data.library_name == "transformers"
    assert {"dotmoe", "moe", "glm4_moe"} <= set(card.data.tags)
    assert card.data.base_model is None  # a local folder is no hub name
    assert dense.source in text
    assert 'from_pretrained("path/to/this/folder")' in text  # 5_export is no name to load it by
    assert "5_export" not in text
    assert "vllm serve path/to/this/folder --dtype float32" in text
    assert "Any number of experts from 1 to 12 may run" in text
    assert "dotmoe edit path/to/this/folder --active-experts K" in text
    assert "3 of 12 experts" in text
    assert ".partial" not in text
    assert "sparsity" not in text.lower()  # a word that the paper uses both ways
    for row in record.routers[0].runtimes:
        worst = max(
            each.gate_deviation
            for scale in record.routers
            for each in scale.runtimes
            if each.runtime == row.runtime
        )
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {row.runtime} |")]
        assert f"| {worst:.4g} |" in line


def test_counts_are_those_of_the_design(record_and_folder):
    record, folder, dense = record_and_folder
    total = sum(parameter.numel() for parameter in dense.model.parameters())
    ffn, routers = 3 * 64 * 96 * 2, 2 * 12 * 64
    active = total - ffn * 9 // 12
    assert record.parameters == {
        "dense": total,
        "stored": total + routers,
        "active": active,
        "active_with_routers": active + routers,
        "active_without_embeddings": active - 2 * 264 * 64,
    }
    text = (folder / "README.md").read_text()
    assert all(f"{count:,}" in text for count in record.parameters.values())
    assert f"{record.total_bytes:,} bytes" in text
    assert "25.0% of the FFN neurons" in text


def test_a_finetuned_export_names_the_model_that_the_work_began_with(
    dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of("llama")
    record = export(
        dense,
        layout_of(dense),
        tmp_path / "out",
        ExportConfig(),
        tokens_BT,
        origin=dataclasses.replace(dense, source="some-one/Model-1B", revision="0123abc"),
    )
    card = ModelCard((tmp_path / "out/README.md").read_text())
    assert (record.source, record.revision) == ("some-one/Model-1B", "0123abc")
    assert card.data.base_model == "some-one/Model-1B"
    assert "# Model-1B, 3 of 12 experts" in card.text
    assert "revision 0123abc" in card.text
    assert str(dense.folder) not in card.text


def test_results_become_a_table(record_and_folder):
    record, folder, _ = record_and_folder
    rows = [
        {"text": "a | b", "k": 3, "perplexity": 12.34567},
        {"text": "dense", "k": 12, "perplexity": 11.0},
    ]
    write_model_card(folder, record, rows)
    text = (folder / "README.md").read_text()
    assert "| text | k | perplexity |\n| --- | ---: | ---: |\n| a \\| b | 3 | 12.35 |\n" in text


def test_near_ties_that_change_the_texts_are_told_in_a_note(record_and_folder):
    from dotmoe.export import _agreement_notes

    record, _, _ = record_and_folder
    found = record.verification
    assert _agreement_notes(found) == []
    worse = dataclasses.replace(found, own_routes_top1_agreement=0.56)
    (note,) = _agreement_notes(worse)
    assert "56% of the most likely next tokens are the same" in note
    assert note in card_text(dataclasses.replace(record, notes=[note]))
