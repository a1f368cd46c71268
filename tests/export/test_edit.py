import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dotmoe.errors import UserError
from dotmoe.export import ExportConfig, ExportRecord, export, set_active_experts
from dotmoe.files import with_checksum
from dotmoe.granularity import Granularity
from dotmoe.layout import ALWAYS_ON
from dotmoe.moe.masked import masked_by
from dotmoe.parameters import count_parameters

FILES = ("README.md", "dotmoe.json", "config.json")


@pytest.fixture
def exported(dense_of, layout_of, tokens_BT, tmp_path):
    """A glm4_moe export with k = 3 of 12."""
    dense = dense_of("llama")
    layout = layout_of(dense)
    export(dense, layout, tmp_path / "out", ExportConfig(), tokens_BT)
    return dense, layout, tmp_path / "out"


def texts(folder):
    return {name: (folder / name).read_text() for name in FILES}


@pytest.mark.parametrize("active_experts", [1, 7])
@pytest.mark.parametrize(("family", "target"), [("llama", "glm4_moe"), ("qwen2", "qwen2_moe")])
def test_the_edited_export_computes_the_masked_model_with_that_k(
    family, target, active_experts, dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of(family)
    layout = layout_of(dense)
    record = export(dense, layout, tmp_path / "out", ExportConfig(format=target), tokens_BT)
    keyword = {record.active_experts_key: active_experts}  # as the model card says
    unedited = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, **keyword
    )
    set_active_experts(tmp_path / "out", active_experts)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=tokens_BT).logits
        assert torch.equal(unedited(input_ids=tokens_BT).logits, logits)
        with masked_by(dense, layout.with_active_experts(active_experts)):
            reference = dense.model(input_ids=tokens_BT).logits
    # Of the median token: a near-tie that falls the other way changes all later tokens of its row.
    per_token = (logits - reference).abs().mean(dim=-1).flatten()
    assert float(per_token.median() / reference.std()) < 2e-3


def test_config_record_and_card_agree_and_counts_are_those_of_the_design(exported):
    dense, _, folder = exported
    before, record = texts(folder), ExportRecord.load(folder)
    changed = set_active_experts(folder, 6)
    after = texts(folder)
    config = json.loads(after["config.json"])
    assert config == json.loads(before["config.json"]) | {"num_experts_per_tok": 6}
    assert ExportRecord.load(folder) == changed
    counts = count_parameters(
        dense.config, dense.family, Granularity(num_experts=12, expert_size=8, active_experts=6)
    )
    assert changed.parameters == {
        "dense": counts.dense_total,
        "stored": counts.stored,
        "active": counts.active,
        "active_with_routers": counts.active_with_routers,
        "active_without_embeddings": counts.active_without_embeddings,
    }
    assert (changed.active_experts, changed.active_fraction) == (6, 0.5)
    assert changed.verification == record.verification
    card = after["README.md"]
    assert "6 of 12 experts" in card
    assert "50.0% of the FFN neurons" in card
    assert f"| active | {counts.active:,} |" in card
    assert "from 3 to 6" in card
    assert "at k = 3;" in card
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []
    set_active_experts(folder, 3)
    assert texts(folder) == before


def test_counts_hold_with_always_on_neurons_and_dense_layers(
    dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of("llama", num_hidden_layers=3, intermediate_size=120)
    layout = layout_of(dense)
    row = torch.cat([torch.full((24,), ALWAYS_ON), torch.arange(12).repeat_interleave(8)])
    experts = torch.stack([torch.full_like(row, ALWAYS_ON), row, row])
    layout = replace(layout, expert_of_neuron_LN=experts)
    export(dense, layout, tmp_path / "out", ExportConfig(), tokens_BT)
    changed = set_active_experts(tmp_path / "out", 8)
    split = Granularity(
        num_experts=12, expert_size=8, active_experts=8, shared_size=24, first_dense_layers=1
    )
    counts = count_parameters(dense.config, dense.family, split)
    assert changed.parameters["active"] == counts.active
    assert changed.parameters["active_with_routers"] == counts.active_with_routers
    assert changed.active_fraction == pytest.approx(88 / 120)


def test_a_k_out_of_range_is_refused(exported):
    before = texts(exported[2])
    for k in (0, -1, 13):
        with pytest.raises(UserError, match=rf"active_experts is {k}, .* Choose 1 to 12"):
            set_active_experts(exported[2], k)
    assert texts(exported[2]) == before


def test_a_format_with_k_in_its_weights_is_refused_with_the_command_that_helps(
    dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of("llama")
    config = ExportConfig(format="mixtral")
    export(dense, layout_of(dense), tmp_path / "out", config, tokens_BT)
    before = texts(tmp_path / "out")
    command = "dotmoe export RUN OUT --format mixtral --active-experts 6"
    with pytest.raises(UserError, match=command):
        set_active_experts(tmp_path / "out", 6)
    assert texts(tmp_path / "out") == before


def test_a_folder_that_dotmoe_did_not_export_is_refused(exported, tmp_path):
    shutil.copytree(exported[0].folder, tmp_path / "dense")
    with pytest.raises(UserError, match=r"dense holds no dotmoe\.json"):
        set_active_experts(tmp_path / "dense", 6)
    (tmp_path / "dense" / "dotmoe.json").write_text(with_checksum({"name": "another version"}))
    with pytest.raises(UserError, match=r"is no record of an export"):
        set_active_experts(tmp_path / "dense", 6)


def test_a_config_without_the_key_is_refused(exported):
    path = exported[2] / "config.json"
    config = json.loads(path.read_text())
    del config["num_experts_per_tok"]
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="lacks num_experts_per_tok"):
        set_active_experts(exported[2], 6)


@pytest.mark.parametrize("failing", ["README.md", "dotmoe.json", "config.json"])
def test_after_an_error_all_files_are_the_old_ones(failing, exported, monkeypatch):
    folder, error = exported[2], OSError(errno.EIO, "broken")
    before = texts(folder)
    real = Path.replace

    def replace_or_fail(source, target):
        if source.name == f"..{failing}.new.partial":
            raise error
        return real(source, target)

    monkeypatch.setattr(Path, "replace", replace_or_fail)
    with pytest.raises(type(error)):
        set_active_experts(folder, 6)
    assert texts(folder) == before
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_full_disk_is_told_in_one_line(exported, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = texts(exported[2])
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        set_active_experts(exported[2], 6)
    assert texts(exported[2]) == before


KILLED = """
import os, sys
from pathlib import Path
from dotmoe.export import set_active_experts
real = Path.replace
def replace_or_die(source, target):
    if source.name == f".{sys.argv[2]}.new":
        os._exit(9)
    return real(source, target)
Path.replace = replace_or_die
set_active_experts(Path(sys.argv[1]), 6)
"""


def test_a_killed_edit_leaves_a_whole_model_and_the_same_call_finishes_it(exported, tmp_path):
    _, _, folder = exported
    shutil.copytree(folder, tmp_path / "aside")
    set_active_experts(tmp_path / "aside", 6)
    for failing in FILES:
        died = subprocess.run([sys.executable, "-c", KILLED, str(folder), failing])
        assert died.returncode == 9
        # Runtimes read config.json alone: it is the old one, whole, until the very last step.
        assert json.loads(texts(folder)["config.json"])["num_experts_per_tok"] == 3
        ExportRecord.load(folder)
    set_active_experts(folder, 6)
    assert texts(folder) == texts(tmp_path / "aside")
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
