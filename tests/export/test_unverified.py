"""Outlier tokens are no wrong export, and one that is wrong is kept under a name that says so."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from dotmoe.cli import run
from dotmoe.errors import VerificationError
from dotmoe.export import ExportConfig, ExportRecord, export
from dotmoe.load import describe_dense


@pytest.fixture
def massive(tiny_dense, layout_of, tmp_path):
    """A model whose token 0 has a massive activation, the layout that amplifies it, and a text."""
    folder = shutil.copytree(tiny_dense("llama"), tmp_path / "massive")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 0] = 0
    tensors["model.embed_tokens.weight"][0] = 0
    tensors["model.embed_tokens.weight"][0, 0] = 400
    for layer in range(2):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.{layer}.{name}.weight"][0] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    dense = describe_dense(str(folder))
    layout = layout_of(dense)
    layout.router_LED[:, :, 0] = 0
    layout.router_LED[:, 7, 0] = 14
    tokens = torch.randint(2, 258, (8, 256))
    tokens[0, 0] = 0
    return dense, layout, tokens


@pytest.mark.parametrize("target", ["glm4_moe", "mixtral"])
def test_an_outlier_token_does_not_refuse_a_right_export(target, massive, tmp_path):
    dense, layout, tokens = massive
    record = export(dense, layout, tmp_path / "out", ExportConfig(format=target), tokens)
    rows = [row for scale in record.routers for row in scale.runtimes]
    assert max(row.gate_deviation for row in rows) < 2**-6
    assert max(row.largest_gate_deviation for row in rows) > 2**-6
    assert record.routers[0].outliers == 1 / 2048
    assert record.verification.layers[0].outliers == 1 / 512
    assert record.problems == []


def test_an_export_beyond_a_limit_is_kept_and_called_unverified(
    dense_of, layout_of, tokens_BT, tmp_path, monkeypatch
):
    dense = dense_of("llama")
    monkeypatch.setattr(sys.modules["dotmoe.export.routers"], "LOG2_SCALED_STD", -24.0)
    for _ in range(2):  # a second try replaces what the first left
        with pytest.raises(VerificationError, match=r"misrouted.* is kept, unverified, as"):
            export(dense, layout_of(dense), tmp_path / "out", ExportConfig(), tokens_BT)
    assert [path.name for path in tmp_path.iterdir()] == ["out_unverified"]
    record = ExportRecord.load(tmp_path / "out_unverified")
    assert record.problems
    assert record.verification is not None
    assert record.name == "out_unverified"
    assert "**Unverified.** " in (tmp_path / "out_unverified/README.md").read_text()


def test_convert_ends_with_a_checkpoint_and_exit_code_3(
    tiny_dense, text_file, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys.modules["dotmoe.export.routers"], "LOG2_SCALED_STD", -24.0)
    arguments = ["convert", str(tiny_dense("llama")), str(tmp_path / "run"), "--steps", "0"]
    arguments += ["--data", str(text_file), "--seq-len", "64", "--eval-tokens", "256"]
    assert run(arguments) == 3
    assert "5_export_unverified" in capsys.readouterr().err
    out = tmp_path / "run/5_export_unverified"
    assert json.loads((out / "dotmoe.json").read_text())["problems"]
    assert (out / "model.safetensors").is_file()
