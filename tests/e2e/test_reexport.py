"""`dotmoe export`: a finished run in another format or with another k, and what it refuses."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from dotmoe.cli import run
from dotmoe.layout import ExpertLayout
from dotmoe.load import LoadConfig, load_dense
from dotmoe.moe.surgery import masked_by


def logits(folder, tokens_BT):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(input_ids=tokens_BT).logits


@pytest.mark.parametrize(
    ("options", "model_type", "active_experts"),
    [
        (["--format", "mixtral", "--active-experts", "5"], "mixtral", 5),
        (["--format", "granitemoe"], "granitemoe", 3),
        (["--export-dtype", "bfloat16", "--active-experts", "12"], "glm4_moe", 12),
    ],
)
def test_a_run_is_exported_again(options, model_type, active_experts, finished, quick, tmp_path):
    folder, model = finished
    before = sorted(path for path in folder.rglob("*") if path.is_file())
    out = tmp_path / "again"
    assert run(["export", str(folder), str(out), *options, *quick]) == 0
    assert json.loads((out / "config.json").read_text())["model_type"] == model_type
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == before
    dense = load_dense(model, LoadConfig())
    layout = ExpertLayout.load(folder / "3_extract" / "layout.safetensors")
    tokens_BT = torch.randint(2, 250, (2, 48))
    with torch.no_grad(), masked_by(dense, layout.with_active_experts(active_experts)):
        expected = dense.model(input_ids=tokens_BT).logits
    difference = (logits(out, tokens_BT).float() - expected).abs().mean(dim=-1).median()
    assert float(difference / expected.std()) < (0.05 if "bfloat16" in options else 5e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--format", "mixtrel"], "Did you mean mixtral?"),
        (["--format", "qwen3_moe"], "Formats that can hold it: glm4_moe, mixtral"),
        (["--active-experts", "13"], "Choose 1 to 12"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_line(
    options, words, finished, quick, tmp_path, capsys
):
    folder, _ = finished
    capsys.readouterr()
    assert run(["export", str(folder), str(tmp_path / "again"), *options, *quick]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (tmp_path / "again").exists()


def test_a_folder_without_a_finished_run_is_refused(tmp_path, capsys):
    assert run(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "no run with a finished extract stage" in capsys.readouterr().err
