"""Weights that stay on disk: the same numbers, one part in memory."""

import math
from unittest.mock import MagicMock, Mock, patch

import pytest
import torch
from huggingface_hub.errors import XetDownloadError

from dotmoe.common.errors import UserError, VerificationError
from dotmoe.export import llama_cpp
from dotmoe.method.config import CalibrateConfig
from dotmoe.method.granularity import Granularity
from dotmoe.models import checkpoint, source
from dotmoe.models import on_disk as module
from dotmoe.models.checkpoint import Tensors
from dotmoe.models.family import FAMILIES
from dotmoe.models.from_gguf import GgufFile
from dotmoe.models.load import describe_dense, whole_weights
from dotmoe.models.on_disk import exported_on_disk, on_disk, parts_of
from dotmoe.models.save import write_weights
from dotmoe.models.source import checkpoint_folder
from dotmoe.rivals.baselines import SplitInputs, baseline, granularity_of
from dotmoe.rivals.baselines.contract import next_token_loss
from dotmoe.rivals.config import BaselineConfig
from export.comparison import logits_of, stock_logits
from runs import FORMATS_OF, in_turn, rewritten

CPU = torch.device("cpu")
FAMILY_OF = {name: family for family, names in FORMATS_OF.items() for name in names}


@pytest.fixture
def nothing_is_kept(monkeypatch):
    """Tiny models would stay in memory once they are read."""
    monkeypatch.setattr(module, "KEPT_BYTES", 0)


@pytest.fixture
def filled(monkeypatch):
    """How many parts were in memory after each was read."""
    now, counts, part = set(), [], module._Part
    fill, empty = part.fill, part.empty

    def count_in(self, *arguments):
        fill(self, *arguments)
        now.add(self)
        counts.append(len(now))

    def count_out(self, *arguments):
        empty(self, *arguments)
        now.discard(self)

    monkeypatch.setattr(part, "fill", count_in)
    monkeypatch.setattr(part, "empty", count_out)
    return counts


def change(folder, name, how):
    """Put another tensor in place of one, or none."""
    with rewritten(folder) as tensors:
        changed = how(tensors.pop(name, None))
        tensors.update({} if changed is None else {name: changed})


@pytest.mark.parametrize("name", FAMILY_OF)
def test_an_export_runs_from_disk_as_stock_transformers_runs_it(
    name, exported, tokens_BT, nothing_is_kept
):
    out = exported(FAMILY_OF[name], format=name, export_dtype="bfloat16").folder
    norm = next(key for key in Tensors(out, tied=False).names if "layers.1.post_att" in key)
    change(out, norm, lambda tensor: tensor.float() * 1.001)  # bfloat16 would round it
    expected, whole = stock_logits(out, tokens_BT), Tensors.read_all
    with patch.object(Tensors, "read_all", autospec=True, side_effect=whole) as read:
        ours = exported_on_disk(out, CPU, torch.float32)
        assert all(torch.equal(logits_of(ours, tokens_BT), expected) for _ in range(2))
    assert all("model.embed_tokens.weight" not in call.args[1] for call in read.mock_calls)


@pytest.mark.parametrize(("family", "dtype"), in_turn(FAMILIES, ("bfloat16", "float32")))
def test_a_dense_model_runs_from_disk_as_it_runs_in_memory(
    family, dtype, dense_of, tokens_BT, nothing_is_kept
):
    tied = {"head_only": True} if family == "llama" else {"tied": dtype == "float32"}
    dense = dense_of(family, dtype="bfloat16", load_dtype=dtype, **tied)
    from_disk = on_disk(describe_dense(dense.source), CPU, getattr(torch, dtype))
    assert from_disk.device == CPU
    for _ in range(2):
        expected = logits_of(dense.model, tokens_BT)
        assert torch.equal(logits_of(from_disk.model, tokens_BT), expected)
    held = sum(parameter.untyped_storage().nbytes() for parameter in from_disk.model.parameters())
    assert held < 8 * len(list(from_disk.model.parameters()))


def test_no_more_than_one_part_is_in_memory_throughout_an_export(
    tiny_dense, exported, nothing_is_kept, filled
):
    dense = describe_dense(str(tiny_dense("llama", num_hidden_layers=5)))
    assert exported(dense).record.problems == []
    assert max(filled) == 1
    assert len(filled) > 4 * len(parts_of(dense.model))


def test_what_needs_weights_refuses_where_they_are_not(tiny_dense, tokens_BT, tmp_path):
    described = describe_dense(str(tiny_dense("llama")))
    stored = on_disk(described, CPU, torch.float32)
    assert (described.weights, stored.weights) == ("meta", "disk")
    calls = [
        lambda: whole_weights(described, 0).__enter__(),
        lambda: next_token_loss(stored, tokens_BT),
        lambda: write_weights(stored, tmp_path / "model"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"weights of .* are in (meta|disk), not"):
            call()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["static_pruning", "cmoe", "weight_clusters"])
def test_a_method_splits_weights_on_disk_as_those_in_memory(
    method, dense, tokens_BT, nothing_is_kept
):
    options = {"config": BaselineConfig(), "calibrate": CalibrateConfig(), "seed": 0}
    split = granularity_of(method, Granularity(num_experts=12, expert_size=8, active_experts=4))
    one, other = (
        baseline(method, SplitInputs(dense=d, tokens_BT=tokens_BT, granularity=split, **options))
        for d in (dense, on_disk(dense, CPU, torch.float32))
    )
    assert torch.equal(one.layout.expert_of_neuron_LN, other.layout.expert_of_neuron_LN)
    assert torch.equal(one.layout.router_LED, other.layout.router_LED)


def test_damaged_dense_files_are_named(copied, tokens_BT):
    name, folder = "model.layers.1.mlp.up_proj.weight", copied
    change(folder, name, lambda tensor: tensor.index_fill(0, torch.tensor([5]), math.inf))
    dense = on_disk(describe_dense(str(folder)), CPU, torch.float32)
    with pytest.raises(UserError, match=f"{name} in .* contains NaN or infinity"):
        logits_of(dense.model, tokens_BT)
    change(folder, name, lambda tensor: tensor[:-8].clone())
    with pytest.raises(UserError, match=rf"{name} has shape \(88, 64\) .* requires \(96, 64\)"):
        on_disk(describe_dense(str(folder)), CPU, torch.float32)
    change(folder, name, lambda tensor: None)
    with pytest.raises(UserError, match=f"{name} is missing from the safetensors"):
        on_disk(describe_dense(str(folder)), CPU, torch.float32)


@pytest.mark.parametrize(
    ("stray", "problem"),
    [
        ("model.layers.1.mlp.experts.12.up_proj.weight", "cannot load layer 1 of"),
        ("model.layers.7.mlp.gate.weight", "unexpected_keys in"),
        ("model.extra.weight", "unexpected_keys in"),
    ],
)
def test_a_tensor_too_many_is_found_wherever_it_is(stray, problem, exported, tokens_BT):
    folder = exported().folder
    change(folder, stray, lambda tensor: torch.zeros(8, 64))
    with pytest.raises(VerificationError, match=problem):
        logits_of(exported_on_disk(folder, CPU, torch.float32), tokens_BT)


def test_memory_that_runs_out_is_no_wrong_export(exported, tokens_BT, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    folder = exported().folder
    monkeypatch.setattr(module, "read_stock", refuse)
    with pytest.raises(RuntimeError, match="allocate memory"):
        logits_of(exported_on_disk(folder, CPU, torch.float32), tokens_BT)


def test_weights_that_may_not_be_read_are_not_said_to_be_missing(copied, monkeypatch):
    def refuse(path, **_):
        raise FileNotFoundError(path)  # as safetensors says it

    monkeypatch.setattr(checkpoint, "safe_open", refuse)
    monkeypatch.setattr(checkpoint.os, "access", lambda *_: False)  # root may read everything
    with pytest.raises(UserError, match=r"model.safetensors: Permission denied\. Get permission"):
        on_disk(describe_dense(str(copied)), CPU, torch.float32)


def test_a_gguf_is_compared_with_one_part_in_memory(
    tiny_dense, exported, nothing_is_kept, filled, monkeypatch
):
    # In place of llama.cpp, which is not installed everywhere: no logit says anything.
    silent = MagicMock(logits=lambda tokens_T: torch.zeros(len(tokens_T), 264), ask=lambda what: "")
    silent.return_value.__enter__.return_value = silent
    active = []

    def opened(path, context):
        active.append(GgufFile(path).size("expert_used_count"))
        return silent.return_value

    silent.side_effect = opened
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: True)
    monkeypatch.setattr(llama_cpp, "LlamaCppModel", silent)
    dense = describe_dense(str(tiny_dense("llama", num_hidden_layers=5)))
    with pytest.raises(VerificationError, match=r"llama.cpp computes something else"):
        exported(dense, format="gguf_glm4moe", gguf_type="f32", gguf_tokenizer="none")
    assert active == [3, 12]  # the second time all experts
    assert max(filled) == 1
    assert len(filled) > 2 * len(parts_of(dense.model))


def test_a_name_that_leads_to_no_model_is_one_line(monkeypatch):
    with pytest.raises(UserError, match="is no local folder and cannot be fetched from the hub"):
        checkpoint_folder("a" * 300)
    with pytest.raises(UserError, match="does not exist"):
        checkpoint_folder("a text instead of a name, " * 99 + "/model")
    # Not all that the hub's library raises is an OSError.
    download = Mock(side_effect=XetDownloadError("no such\nchunk"))
    monkeypatch.setattr(source, "snapshot_download", download)
    with pytest.raises(UserError, match=r"cannot be fetched from the hub \(no such chunk\)"):
        checkpoint_folder("someone/model")
