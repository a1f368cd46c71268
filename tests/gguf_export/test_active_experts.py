"""k changed in a written file."""

import json
import shutil

import pytest

from dotmoe.cli import run
from dotmoe.errors import UserError
from dotmoe.gguf_export import GgufConfig, export_gguf, set_active_experts, write_dense_gguf


@pytest.fixture(autouse=True)
def _without_llama_cpp(monkeypatch):
    monkeypatch.setattr("dotmoe.gguf_export.written.is_installed", lambda: False)


@pytest.mark.parametrize("name", ["gguf_llama", "gguf_glm4moe"])
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_the_file_becomes_that_of_a_fresh_export_byte_for_byte(
    name, kind, dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of("llama")
    layout = layout_of(dense, active_experts=3)
    config = GgufConfig(format=name, type=kind)
    export_gguf(dense, layout, tmp_path / "three", config, tokens_BT)
    file = tmp_path / f"three/model-{kind}.gguf"
    before = file.read_bytes()
    # The scale of the routers is chosen where k experts run, so the same p is asked of the fresh
    # export by giving it the same text through the same experts.
    for active_experts in (7, 12, 1):
        fresh = tmp_path / f"fresh{active_experts}"
        export_gguf(dense, layout.with_active_experts(active_experts), fresh, config, tokens_BT)
        set_active_experts(file, active_experts)
        assert file.read_bytes() == (fresh / file.name).read_bytes()
        record = json.loads((tmp_path / "three/dotmoe.json").read_text())
        assert record["active_experts"] == active_experts
    assert file.read_bytes() != before
    set_active_experts(file, 3)
    assert file.read_bytes() == before


def test_k_out_of_range_changes_nothing(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("llama")
    export_gguf(dense, layout_of(dense), tmp_path / "out", GgufConfig(), tokens_BT)
    file = tmp_path / "out/model-f32.gguf"
    before = file.read_bytes()
    for active_experts in (0, 13):
        with pytest.raises(UserError, match=r"12 experts a layer. Choose 1 to 12"):
            set_active_experts(file, active_experts)
    assert file.read_bytes() == before


def test_more_experts_than_llama_cpp_has_room_for_are_refused_before_anything_is_written(
    dense_of, layout_of, tokens_BT, tmp_path, capsys
):
    dense = dense_of("llama", num_hidden_layers=12)  # llama.cpp 0.3.36 runs k = 30 and not 32
    layout = layout_of(dense, num_experts=48, active_experts=32)
    with pytest.raises(UserError, match=r"32 experts run per token.*has room for 28"):
        export_gguf(dense, layout, tmp_path / "out", GgufConfig(format="gguf_glm4moe"), tokens_BT)
    assert not (tmp_path / "out").exists()
    export_gguf(dense, layout.with_active_experts(3), tmp_path / "out", GgufConfig(), tokens_BT)
    with pytest.raises(UserError, match="has room for 28"):
        set_active_experts(tmp_path / "out/model-f32.gguf", 32)
    split = ["--experts", "48", "--active-experts"]
    for active, is_warned in (("32", True), ("28", False)):
        assert run(["inspect", str(dense.folder), *split, active]) == 0
        assert ("llama.cpp runs at most 28 of this model" in capsys.readouterr().out) == is_warned


def test_files_that_are_not_ours_are_refused(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("llama")
    with pytest.raises(UserError, match="does not exist"):
        set_active_experts(tmp_path / "none.gguf", 2)
    (tmp_path / "text.gguf").write_text("not a model, but longer than a header of one")
    with pytest.raises(UserError, match="no whole GGUF file"):
        set_active_experts(tmp_path / "text.gguf", 2)
    write_dense_gguf(dense, tmp_path / "dense", GgufConfig(), tokens_BT)
    with pytest.raises(UserError, match="has no experts"):
        set_active_experts(tmp_path / "dense/model-f32.gguf", 2)
    export_gguf(dense, layout_of(dense), tmp_path / "out", GgufConfig(), tokens_BT)
    folded = tmp_path / "folded.gguf"
    shutil.copyfile(tmp_path / "out/model-f32.gguf", folded)
    from dotmoe.gguf_export.gguf_file import GgufFile

    file = GgufFile(folded, writable=True)
    field = file.reader.fields["glm4moe.expert_weights_scale"]
    field.parts[field.data[0]][0] = 2.5
    file.reader.data.flush()
    with pytest.raises(UserError, match="does not weight its experts by k"):
        set_active_experts(folded, 2)
