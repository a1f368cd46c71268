"""k of an export, changed in place. Oracle: the masked model with that k."""

import errno
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dotmoe.errors import UserError
from dotmoe.export import ExportConfig, ExportRecord, export
from dotmoe.export.record import set_active_experts
from dotmoe.files import with_checksum
from dotmoe.granularity import count_parameters
from dotmoe.moe.masked import masked_by

FILES = ("README.md", "dotmoe.json", "config.json")


@pytest.fixture
def exported(dense_of, layout_of, tokens_BT, tmp_path):
    """A glm4_moe export with k = 3 of 12."""
    dense = dense_of("llama")
    export(dense, layout_of(dense), tmp_path / "out", ExportConfig(), tokens_BT)
    return dense, tmp_path / "out"


def texts(folder):
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    return {name: (folder / name).read_text() for name in FILES}


@pytest.mark.parametrize(("family", "target"), [("llama", "glm4_moe"), ("qwen2", "qwen2_moe")])
def test_the_edited_export_computes_the_masked_model_with_that_k(
    family, target, dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of(family)
    layout = layout_of(dense)
    record = export(dense, layout, tmp_path / "out", ExportConfig(format=target), tokens_BT)
    keyword = {record.active_experts_key: 7}  # as the model card says
    unedited = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, **keyword
    )
    set_active_experts(tmp_path / "out", 7)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=tokens_BT).logits
        assert torch.equal(unedited(input_ids=tokens_BT).logits, logits)
        with masked_by(dense, replace(layout, active_experts=7)):
            reference = dense.model(input_ids=tokens_BT).logits
    # Of the median token: a near-tie that falls the other way changes all later tokens of its row.
    per_token = (logits - reference).abs().mean(dim=-1).flatten()
    assert float(per_token.median() / reference.std()) < 2e-3


def test_config_record_and_card_agree_and_counts_are_those_of_the_design(
    dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of("llama", num_hidden_layers=3, intermediate_size=120)
    layout, folder = layout_of(dense, shared_size=24, dense_layers=1), tmp_path / "out"
    record = export(dense, layout, folder, ExportConfig(), tokens_BT)
    before = texts(folder)
    changed = set_active_experts(folder, 8)
    after = texts(folder)
    config = json.loads(after["config.json"])
    assert config == json.loads(before["config.json"]) | {"num_experts_per_tok": 8}
    assert ExportRecord.load(folder) == changed
    fitted = replace(record, is_finetuned=True).with_active_experts(8)
    assert "fitted" not in changed.notes[-1]
    assert fitted.notes[-1].endswith("measured at 3, and the weights were fitted at it.")
    split = replace(layout, active_experts=8).granularity
    counts = count_parameters(dense.config, dense.family, split)
    assert changed.parameters["stored"] == counts.stored
    assert changed.parameters["active"] == counts.active
    assert changed.parameters["active_with_routers"] == counts.active_with_routers
    assert (changed.active_experts, changed.active_fraction) == (8, pytest.approx(88 / 120))
    assert changed.verification == record.verification
    for words in ("8 of 12 experts", f"| active | {counts.active:,} |", "from 3 to 8", "at k = 3;"):
        assert words in after["README.md"]
    set_active_experts(folder, 3)
    assert texts(folder) == before


def test_a_k_out_of_range_is_refused_and_a_config_without_one_is_mended(exported):
    before = texts(exported[1])
    for k in (0, 13):
        with pytest.raises(UserError, match=rf"active_experts is {k}, .* Choose 1 to 12"):
            set_active_experts(exported[1], k)
    assert texts(exported[1]) == before
    config = json.loads(before["config.json"])
    del config["num_experts_per_tok"]
    (exported[1] / "config.json").write_text(json.dumps(config))
    set_active_experts(exported[1], 6)
    assert json.loads(texts(exported[1])["config.json"]) == config | {"num_experts_per_tok": 6}


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


def test_a_folder_that_dotmoe_did_not_export_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no dotmoe\.json"):
        set_active_experts(tmp_path, 6)
    (tmp_path / "dotmoe.json").write_text(with_checksum({"name": "another version"}))
    with pytest.raises(UserError, match=r"is no record of an export"):
        set_active_experts(tmp_path, 6)


@pytest.mark.parametrize("failing", FILES)
def test_after_an_error_such_as_a_full_disk_all_files_are_the_old_ones(
    failing, exported, monkeypatch
):
    before = texts(exported[1])
    real = Path.replace

    def replace_or_fail(source, target):
        if source.name == f"..{failing}.new.partial":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(source, target)

    monkeypatch.setattr(Path, "replace", replace_or_fail)
    with pytest.raises(OSError, match="No space left on device"):
        set_active_experts(exported[1], 6)
    assert texts(exported[1]) == before


KILLED = """
import os, sys
from pathlib import Path
from dotmoe.export.record import set_active_experts
real = Path.replace
def replace_or_die(source, target):
    if source.name == f".{sys.argv[2]}.new":
        os._exit(9)
    return real(source, target)
Path.replace = replace_or_die
set_active_experts(Path(sys.argv[1]), 6)
"""


def test_a_killed_edit_leaves_a_whole_model_and_the_same_call_finishes_it(exported, tmp_path):
    folder = exported[1]
    shutil.copytree(folder, tmp_path / "aside")
    set_active_experts(tmp_path / "aside", 6)
    for failing in FILES:
        died = subprocess.run([sys.executable, "-c", KILLED, str(folder), failing])
        assert died.returncode == 9
        # Runtimes read config.json alone: it is the old one, whole, until the very last step.
        assert json.loads((folder / "config.json").read_text())["num_experts_per_tok"] == 3
        ExportRecord.load(folder)
    set_active_experts(folder, 6)
    assert texts(folder) == texts(tmp_path / "aside")
