import dataclasses

from huggingface_hub import ModelCard
from safetensors.torch import load_file

from dotmoe.export import ExportConfig, export, write_model_card
from dotmoe.tables import Table


def test_the_card_says_what_it_is_and_how_to_use_it(dense_of, layout_of, tokens_BT, tmp_path):
    dense, folder = dense_of("llama"), tmp_path / "5_export"
    record = export(dense, layout_of(dense), folder, ExportConfig(), tokens_BT)
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
    for rows in zip(*(scale["runtimes"] for scale in record.routers), strict=True):
        worst = max(row["gate_deviation"] for row in rows)
        (line,) = [li for li in text.splitlines() if li.startswith(f"| {rows[0]['runtime']} |")]
        assert f"| {worst:.4g} |" in line
    total = sum(parameter.numel() for parameter in dense.model.parameters())
    routers, active = 2 * 12 * 64, total - 3 * 64 * 96 * 2 * 9 // 12
    assert record.parameters == {
        "dense": total,
        "stored": total + routers,
        "active": active,
        "active_with_routers": active + routers,
        "active_without_embeddings": active - 2 * 264 * 64,
        "written": sum(tensor.numel() for tensor in load_file(folder / record.files[0]).values()),
    }
    assert all(f"{count:,}" in text for count in record.parameters.values())
    assert f"{record.total_bytes:,} bytes" in text
    assert "25.0% of the FFN neurons" in text
    table = Table(columns=("model", "perplexity"), rows=[["a | b", "12.346"]], note="Text: b.txt.")
    write_model_card(folder, record, table)
    expected = "| model | perplexity |\n| --- | ---: |\n| a \\| b | 12.346 |\n\nText: b.txt."
    assert f"## Results\n\n{expected}\n" in (folder / "README.md").read_text()


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
