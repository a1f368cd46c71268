import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dotmoe.errors import UserError
from dotmoe.export import ExportConfig, export, output_named, require_exportable
from dotmoe.granularity import Granularity
from dotmoe.load import LoadConfig, load_dense


def test_a_float32_export_of_a_float16_checkpoint_needs_to_be_asked_for(
    dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of("llama", dtype="float16")
    layout = layout_of(dense)
    with pytest.raises(UserError, match=r"torch.float16.*Set --export-dtype to float32"):
        export(dense, layout, tmp_path / "out", ExportConfig(), tokens_BT)
    record = export(
        dense, layout, tmp_path / "out", ExportConfig(export_dtype="float32"), tokens_BT
    )
    assert record.dtype == "float32"


def test_a_router_that_would_be_rounded_is_refused(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("llama", dtype="bfloat16")
    with pytest.raises(UserError, match=r"Router entry .* of layer 0 .* not exact in torch.bf"):
        export(dense, layout_of(dense), tmp_path / "out", ExportConfig(), tokens_BT)
    assert list(tmp_path.iterdir()) == []


def test_a_layout_of_another_model_is_refused(dense_of, layout_of, tokens_BT, tmp_path):
    layout = layout_of(dense_of("llama"))
    other = dense_of("llama", num_hidden_layers=3)
    with pytest.raises(UserError, match=r"\(2, 96, 64\).*\(3, 96, 64\)"):
        export(other, layout, tmp_path / "out", ExportConfig(), tokens_BT)


def test_one_expert_is_refused(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("llama")
    layout = layout_of(dense, num_experts=1, active_experts=1)
    with pytest.raises(UserError, match="at least 2"):
        export(dense, layout, tmp_path / "out", ExportConfig(), tokens_BT)


def test_experts_that_stock_kernels_cannot_run_are_refused_before_training(dense_of):
    dense = dense_of("llama")
    split = Granularity(num_experts=16, expert_size=6, active_experts=4)
    with pytest.raises(UserError, match=r"expert_size is 6.*multiples of 4 only"):
        require_exportable(dense, split, ExportConfig())
    split = Granularity(num_experts=24, expert_size=4, active_experts=4)
    assert require_exportable(dense, split, ExportConfig()) == torch.float32
    with pytest.raises(UserError, match=r"expert_size is 4, but in bfloat16.*multiples of 8 only"):
        require_exportable(dense, split, ExportConfig(export_dtype="bfloat16"))


def test_weights_that_have_no_place_are_refused(dense_of, layout_of, tokens_BT, tmp_path):
    source = dense_of("llama").folder
    shutil.copytree(source, tmp_path / "dense")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.bias"] = torch.ones(64)
    save_file(tensors, tmp_path / "dense/model.safetensors", metadata={"format": "pt"})
    dense = load_dense(str(tmp_path / "dense"), LoadConfig(device="cpu"))
    with pytest.raises(UserError, match=r"o_proj.bias is stored .* no place"):
        export(dense, layout_of(dense), tmp_path / "out", ExportConfig(), tokens_BT)
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_never_touched(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("llama")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="exists already"):
        export(dense, layout_of(dense), out, ExportConfig(), tokens_BT)
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "mine.txt"]


def test_an_unknown_format_names_the_nearest():
    with pytest.raises(UserError, match="Did you mean glm4_moe"):
        output_named("glm4-moe")


def test_no_text_is_refused(dense_of, layout_of, tmp_path):
    dense = dense_of("llama")
    empty = torch.zeros(0, 16, dtype=torch.long)
    with pytest.raises(UserError, match="never written unverified"):
        export(dense, layout_of(dense), tmp_path / "out", ExportConfig(), empty)
