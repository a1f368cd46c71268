import dataclasses

import pytest
from huggingface_hub import ModelCard

from dotmoe.export import ExportConfig, export, write_model_card


@pytest.fixture
def record_and_folder(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("llama")
    record = export(dense, layout_of(dense), tmp_path / "tiny-moe", ExportConfig(), tokens_BT)
    return record, tmp_path / "tiny-moe", dense


def test_the_card_says_what_it_is_and_how_to_use_it(record_and_folder):
    _, folder, dense = record_and_folder
    text = (folder / "README.md").read_text()
    card = ModelCard(text)
    assert card.data.library_name == "transformers"
    assert {"dotmoe", "moe", "glm4_moe"} <= set(card.data.tags)
    assert card.data.base_model is None  # a local folder is no hub name
    assert dense.source in text
    assert 'from_pretrained("tiny-moe")' in text
    assert "vllm serve tiny-moe" in text
    assert "Any number of experts from 1 to 12 may run" in text
    assert "dotmoe edit tiny-moe --active-experts K" in text
    assert "`num_experts_per_tok=K`" in text
    assert "3 of 12 experts" in text
    assert ".partial" not in text


def test_counts_are_those_of_the_design(record_and_folder):
    record, folder, dense = record_and_folder
    total = sum(parameter.numel() for parameter in dense.model.parameters())
    ffn = 3 * 64 * 96 * 2
    routers = 2 * 12 * 64
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


def test_a_hub_model_is_named_in_the_front_matter(record_and_folder):
    record, folder, _ = record_and_folder
    hub = dataclasses.replace(record, source="some-one/Model-1B", revision="0123abc")
    write_model_card(folder, hub)
    card = ModelCard((folder / "README.md").read_text())
    assert card.data.base_model == "some-one/Model-1B"
    assert "revision 0123abc" in card.text


def test_results_become_a_table(record_and_folder):
    record, folder, _ = record_and_folder
    rows = [
        {"text": "a | b", "k": 3, "perplexity": 12.34567},
        {"text": "dense", "k": 12, "perplexity": 11.0},
    ]
    write_model_card(folder, record, rows)
    text = (folder / "README.md").read_text()
    assert "| text | k | perplexity |\n|---|---|---|\n| a \\| b | 3 | 12.35 |\n" in text


def test_the_word_that_the_paper_uses_both_ways_is_absent(record_and_folder):
    _, folder, _ = record_and_folder
    assert "sparsity" not in (folder / "README.md").read_text().lower()
