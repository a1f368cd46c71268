"""Record and card of an export; its k changed in place. Oracle: the masked model with that k."""

import errno
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from dotmoe.common.errors import UserError
from dotmoe.common.files import with_checksum
from dotmoe.common.tables import Table
from dotmoe.export.parameters import count_parameters
from dotmoe.export.record import set_active_experts, write_model_card
from dotmoe.export.write import ExportRecord
from export.comparison import masked_logits, relative_error, stock_logits
from runs import weights_of

FILES = ("README.md", "dotmoe.json", "config.json")


def texts(folder):
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    return {name: (folder / name).read_text() for name in FILES}


def test_the_card_says_what_it_is_and_how_to_use_it(exported):
    made = exported(out="5_export")
    dense, record, folder = made.dense, made.record, made.folder
    text = (folder / "README.md").read_text()
    card = ModelCard(text)
    assert card.data.library_name == "transformers"
    assert {"dotmoe", "moe", "glm4_moe"} <= set(card.data.tags)
    assert card.data.base_model is None  # a local folder is no hub name
    for words in (
        f"from the dense model {Path(dense.source).name}:",
        'from_pretrained("path/to/this/folder")',  # 5_export is no name to load it by
        "vllm serve path/to/this/folder --dtype float32",
        "python -m sglang.launch_server --model-path path/to/this/folder --dtype float32",
        "- SGLang: Use 0.5.23 or later: before, Blackwell GPUs need --moe-runner-backend triton.",
        "Any number of experts from 1 to 12 may run",
        "dotmoe export path/to/this/folder --in-place --active-experts K",
        "3 of 12 experts",
        "25.0% of the FFN neurons",
        f"{record.total_bytes:,} bytes",
    ):
        assert words in text
    assert "5_export" not in text
    assert ".partial" not in text
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
        "written": sum(tensor.numel() for tensor in weights_of(folder).values()),
    }
    assert all(f"{count:,}" in text for count in record.parameters.values())
    table = Table(columns=("model", "perplexity"), rows=[["a | b", "12.346"]], note="Text: b.txt.")
    write_model_card(folder, record, table)
    expected = "| model | perplexity |\n| --- | ---: |\n| a \\| b | 12.346 |\n\nText: b.txt."
    assert f"## Results\n\n{expected}\n" in (folder / "README.md").read_text()


def test_a_finetuned_export_names_the_model_that_the_work_began_with(exported, dense_of):
    dense = dense_of("llama")
    origin = replace(dense, source="some-one/Model-1B@0123abc", revision="0123abc")
    made = exported(dense, origin=origin)
    card = ModelCard((made.folder / "README.md").read_text())
    assert (made.record.source, made.record.revision) == ("some-one/Model-1B", "0123abc")
    assert card.data.base_model == "some-one/Model-1B"
    assert "# Model-1B, 3 of 12 experts" in card.text
    assert "revision 0123abc" in card.text
    assert str(dense.folder) not in card.text


def test_the_edited_export_computes_the_masked_model_with_that_k(exported, tokens_BT):
    made = exported("qwen2")
    keyword = {made.record.active_experts_key: 7}  # as the model card says
    unedited = stock_logits(made.folder, tokens_BT, **keyword)
    set_active_experts(made.folder, 7)
    edited = stock_logits(made.folder, tokens_BT)
    assert torch.equal(unedited, edited)
    reference = masked_logits(made.dense, replace(made.layout, active_experts=7), tokens_BT)
    assert relative_error(edited, reference) < 2e-3


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


def test_config_record_and_card_agree_and_counts_are_those_of_the_design(exported, dense_of):
    dense = dense_of("llama", num_hidden_layers=3, intermediate_size=120)
    made = exported(dense, {"shared_size": 24, "dense_layers": 1})
    record, folder = made.record, made.folder
    before = texts(folder)
    changed = set_active_experts(folder, 8)
    after = texts(folder)
    config = json.loads(after["config.json"])
    assert config == json.loads(before["config.json"]) | {"num_experts_per_tok": 8}
    assert ExportRecord.load(folder) == changed
    fitted = replace(record, is_finetuned=True).with_active_experts(8)
    assert "fitted" not in changed.notes[-1]
    assert fitted.notes[-1].endswith("measured at 3, and the weights were fitted at it.")
    split = replace(made.layout, active_experts=8).granularity
    counts = count_parameters(dense.config, dense.family, (split,))
    for name in ("stored", "active", "active_with_routers"):
        assert changed.parameters[name] == getattr(counts, name)
    assert (changed.active_experts, changed.active_fraction) == (8, pytest.approx(88 / 120))
    assert changed.verification == record.verification
    for words in ("8 of 12 experts", f"| active | {counts.active:,} |", "from 3 to 8", "at k = 3;"):
        assert words in after["README.md"]
    set_active_experts(folder, 3)
    assert texts(folder) == before


@pytest.mark.parametrize(
    ("target", "k", "words"),
    [
        ("glm4_moe", 0, "active_experts is 0, .* Choose 1 to 12"),
        ("glm4_moe", 13, "active_experts is 13, .* Choose 1 to 12"),
        ("mixtral", 6, "export RUN OUT --format mixtral --active-experts 6"),  # k is in its weights
    ],
)
def test_a_k_that_cannot_be_is_refused(target, k, words, exported):
    folder = exported(format=target).folder
    before = texts(folder)
    with pytest.raises(UserError, match=words):
        set_active_experts(folder, k)
    assert texts(folder) == before


def test_a_config_without_k_is_mended(exported):
    folder = exported().folder
    config = json.loads((folder / "config.json").read_text())
    del config["num_experts_per_tok"]
    (folder / "config.json").write_text(json.dumps(config))
    set_active_experts(folder, 6)
    assert json.loads(texts(folder)["config.json"]) == config | {"num_experts_per_tok": 6}


def test_a_folder_that_dotmoe_did_not_export_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no dotmoe\.json"):
        set_active_experts(tmp_path, 6)
    (tmp_path / "dotmoe.json").write_text(with_checksum({"name": "another version"}))
    with pytest.raises(UserError, match=r"is not an export record"):
        set_active_experts(tmp_path, 6)


def test_after_an_error_or_a_kill_the_model_is_whole_and_the_same_call_finishes(
    exported, tmp_path, monkeypatch
):
    folder = exported().folder
    before = texts(folder)
    expected = shutil.copytree(folder, tmp_path / "aside")
    set_active_experts(expected, 6)

    def failing(method, in_folder, name, error):
        real = getattr(Path, method)

        def fail(path, *args, **options):
            if path.parent.name == in_folder and name in path.name:
                raise error
            return real(path, *args, **options)

        return fail

    full = OSError(errno.ENOSPC, "No space left on device")
    for name in FILES:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", failing("write_text", "..new.partial", name, full))
            with pytest.raises(OSError, match="No space left on device"):
                set_active_experts(folder, 6)
        assert texts(folder) == before
    for name in FILES:  # nothing runs after such an interrupt, as after a kill
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", failing("replace", ".new", name, KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                set_active_experts(folder, 6)
        # Runtimes read config.json alone: it is the old one, whole, until the very last step.
        assert (folder / "config.json").read_text() == before["config.json"]
        ExportRecord.load(folder)
    set_active_experts(folder, 6)
    assert texts(folder) == texts(expected)
