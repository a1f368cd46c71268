"""Repair of W_down. Oracles: NumPy's least squares on explicit activations, the dense model."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dotmoe.cli import run
from dotmoe.data import TokenBlocks
from dotmoe.finetuning.repair import RIDGES, RepairConfig, repair
from dotmoe.layout import ExpertLayout
from dotmoe.load import LoadConfig, load_dense
from dotmoe.moe.masked import masked_by
from dotmoe.report import RunResults
from runs import TINY_CONVERT, Forked, TinyRun, torchrun

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "granite", "olmo2", "phi3")
TRAINED = ("llama", "granite", "olmo2", "phi3")
SCALED = {"granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5}}
QUICK = ["--scale-tokens", "128", "--verify-tokens", "128"]


def walks(rows):
    """Blocks of 32 tokens, each a walk through 16 letters with steps of its own."""
    start, step = torch.randint(2, 200, (2, rows, 1))
    return TokenBlocks((2 + (start + step * torch.arange(32) ** 2) % 16).int())


@pytest.fixture
def text():
    return walks(41)


def made(folder, **options):
    """The model that a repair has written."""
    return load_dense(str(folder / "model"), LoadConfig(device="cpu", **options))


def down(model, layer=0):
    return model.model.layers[layer].mlp.down_proj.weight.detach().double()


@pytest.mark.parametrize("family", ["llama", "granite", "phi3"])
def test_a_layer_is_the_ridge_regression_of_what_is_missing(
    family, dense_of, layout_of, text, tmp_path
):
    extra = SCALED.get(family, {})
    dense = dense_of(family, num_hidden_layers=1, **extra)
    layout = layout_of(dense, 6, active_experts=2, shared_size=24)
    found = repair(
        dense, layout, text, RepairConfig(repair_tokens=30 * 32, repair_epochs=0), folder=tmp_path
    )
    rows = torch.arange(30) * 41 // 30  # spread over the text
    seen = {}
    block = dense.model.model.layers[0]
    hooks = [
        block.mlp.register_forward_pre_hook(lambda _, args: seen.update(x=args[0][0])),
        block.register_forward_hook(lambda _, args, out: seen.update(h=out[0])),
    ]
    hidden, wanted, after = [], [], []
    for row in text.tokens_BT[rows].long():
        with torch.no_grad():
            dense.model(input_ids=row[None])
            parts = dense.family.ffn(block)
            activation = torch.nn.functional.silu(parts.gate(seen["x"])) * parts.up(seen["x"])
        chosen = (seen["x"] @ layout.router_LED[0].T).topk(2).indices
        runs = torch.zeros(32, 7).scatter(1, chosen, 1.0)
        runs[:, -1] = 1  # number -1: the shared expert
        hidden.append((activation * runs[:, layout.expert_of_neuron_LN[0]]).double().numpy())
        full = activation.double() @ down(dense.model).T
        wanted.append(full.numpy() - hidden[-1] @ down(dense.model).numpy().T)
        after.append(seen["h"].double().numpy())
    for hook in hooks:
        hook.remove()
    size = np.stack([(each**2).mean(1) for each in after])
    root = np.sqrt(np.minimum(np.median(size) / size, 10))[..., None]
    hidden, wanted = np.stack(hidden) * root, np.stack(wanted) * root

    def solved(ridge, rows):
        z, r = hidden[rows].reshape(-1, 96), wanted[rows].reshape(-1, 64)
        penalty = np.sqrt(ridge * (z**2).sum(0).mean()) * np.eye(96)
        return np.linalg.lstsq(np.vstack([z, penalty]), np.vstack([r, np.zeros((96, 64))]))[0]

    is_heldout = np.arange(30) % 8 == 7
    z, r = hidden[is_heldout], wanted[is_heldout]
    errors = [((z @ solved(ridge, ~is_heldout) - r) ** 2).sum() / (r**2).sum() for ridge in RIDGES]
    (layer,) = found["layers"]
    assert layer["ridge"] == RIDGES[int(np.argmin(errors))]
    assert layer["heldout_error"] == pytest.approx(min(errors), rel=1e-3)
    assert min(errors) < 0.8
    assert found["tokens"] == 30 * 32
    change = solved(layer["ridge"], np.arange(30))
    actual = (down(made(tmp_path).model) - down(dense.model)).T.numpy()
    assert np.abs(actual - change).max() < 2e-3 * np.abs(change).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_masked_model_comes_closer_to_the_dense_one(family, dense_of, layout_of, tmp_path):
    """By the refit, and in families that differ in norms, factors or fusion by training behind it.

    Nothing but what is repaired changes; one family is in 16 bits.
    """
    dtype, is_trained = "bfloat16" if family == "qwen2" else "float32", family in TRAINED
    dense = dense_of(family, dtype=dtype, load_dtype=dtype, **SCALED.get(family, {}))
    layout = layout_of(dense, 6, active_experts=3, dense_layers=int(is_trained))
    training, heldout = walks(300 if is_trained else 36), walks(8).tokens_BT.long()
    before = {name: value.clone() for name, value in dense.model.state_dict().items()}
    kl = [divergence(dense, dense, layout, heldout)]
    for epochs in (0, 8) if is_trained else (0,):
        ks, out = (2, 3) if family == "granite" else (), tmp_path / str(epochs)
        config = RepairConfig(repair_tokens=9600, repair_epochs=epochs, repair_active_experts=ks)
        layer = repair(dense, layout, training, config, folder=out)["layers"][-1]
        assert all(torch.equal(before[name], v) for name, v in dense.model.state_dict().items())
        repaired = made(out, dtype=dtype)
        kl.append(divergence(dense, repaired, layout, heldout))
        states, part = repaired.model.state_dict(), "mlp." if epochs else "mlp.down_proj."
        places = tuple(f"model.layers.{index}.{part}" for index in layout.moe_layers)
        changed = {name for name, value in before.items() if not torch.equal(states[name], value)}
        assert changed == {name for name in states if name.startswith(places)}
    assert kl[1] < 0.95 * kl[0], kl
    if is_trained:
        assert kl[2] < 0.9 * kl[1], kl
        assert layer["trained_error"] < layer["heldout_error"]


@torch.no_grad()
def divergence(dense, other, layout, tokens):
    """KL to the dense model, nats a token."""
    truth = dense.model(input_ids=tokens).logits.float().log_softmax(-1)
    with masked_by(other, layout):
        found = other.model(input_ids=tokens).logits.float().log_softmax(-1)
    return float((truth.exp() * (truth - found)).sum(-1).mean())


def test_with_all_experts_on_nothing_changes(dense_of, layout_of, text, tmp_path):
    dense = dense_of("llama")
    repair(dense, layout_of(dense, 6, active_experts=6), text, RepairConfig(), folder=tmp_path)
    for layer in (0, 1):
        assert torch.allclose(
            down(made(tmp_path).model, layer), down(dense.model, layer), atol=1e-4
        )


def test_several_k_at_once_serve_those_that_were_not_fitted_alone(
    dense_of, layout_of, text, tmp_path
):
    dense, kl = dense_of("llama"), []
    layout = layout_of(dense, 6, active_experts=2)
    training, heldout = TokenBlocks(text.tokens_BT[:36]), text.tokens_BT[36:].long()
    for ks in ((), (2, 4, 6)):
        out, config = tmp_path / str(len(ks)), RepairConfig(repair_active_experts=ks)
        found = repair(dense, layout, training, config, folder=out)
        assert found["active_experts"] == list(ks or (2,))
        kl.append(divergence(dense, made(out), replace(layout, active_experts=4), heldout))
    assert kl[1] < kl[0]


def test_a_repair_that_was_stopped_goes_on_to_the_same_weights(dense_of, layout_of, text, tmp_path):
    dense = dense_of("llama", num_hidden_layers=3)
    layout = layout_of(dense, 6, active_experts=2)

    def stop(done, total, note=""):
        if done == 2:
            raise KeyboardInterrupt

    whole = repair(dense, layout, text, RepairConfig(), folder=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        repair(dense, layout, text, RepairConfig(), folder=tmp_path / "cut", on_progress=stop)
    made = {file: file.stat().st_mtime_ns for file in (tmp_path / "cut").rglob("*.safetensors")}
    assert len(made) == 2
    assert repair(dense, layout, text, RepairConfig(), folder=tmp_path / "cut") == whole
    assert all(file.stat().st_mtime_ns == time for file, time in made.items())
    files = [load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "cut")]
    assert all(torch.equal(files[1][name], tensor) for name, tensor in files[0].items())


def test_frozen_repaired_and_finetuned_are_three_rows(tiny_dense, text_file, tmp_path, command):
    """By `convert --repair` and by `finetune --train repair`, which come to the same weights."""
    options = {**TINY_CONVERT, "data": text_file, "steps": 0, "repair_tokens": 4000}
    few = {"scale_tokens": 128, "verify_tokens": 128}
    later = {"train": "repair", "repair_tokens": 4000, **few}
    tuning = {"train": "router", "steps": 4, "batch_size": 2, "lr": 1e-3, "kl_weight": 1, **few}
    dense, names = tiny_dense("llama"), ("frozen", "repaired", "later", "tuned", "mixtral")
    at = {name: tmp_path / name for name in names}
    tuned = [
        command("convert", dense, at["frozen"], **options),
        command("convert", dense, at["repaired"], **options, repair=[]),
        command("finetune", at["frozen"], at["later"], **later),
        command("export", at["repaired"], at["mixtral"], format="mixtral", **few),
        command("finetune", at["repaired"], at["tuned"], **tuning),
    ]
    assert [each.status for each in tuned] == [0] * 5
    for name in ("frozen", "repaired", "later"):
        card = (at[name] / "5_export/README.md").read_text()
        assert ("give back the dense model" in card) == (name == "frozen")
        assert ("Beside the repaired or finetuned model" in card) == (name != "frozen")
    rows = {name: RunResults(at[name]).models for name in ("repaired", "later", "tuned")}
    assert list(rows["repaired"]) == list(rows["later"]) == ["dense", "frozen", "repaired"]
    assert list(rows["tuned"]) == ["dense", "frozen", "repaired", "finetuned"]
    assert all(word in tuned[-1].out for word in ("frozen", "repaired", "finetuned"))
    loss = {name: row["loss"] for name, row in rows["tuned"].items()}
    assert loss["repaired"] == rows["repaired"]["repaired"]["loss"]
    exported = json.loads((at["repaired"] / "5_export/dotmoe.json").read_text())
    assert exported["problems"] == []
    assert exported["source"] == str(dense)
    layout = ExpertLayout.load(at["repaired"] / "4_repair/layout.safetensors")
    trained = made(at["repaired"] / "4_repair")
    tokens = TokenBlocks.load(at["repaired"] / "0_data/heldout.safetensors").tokens_BT.long()
    with torch.no_grad(), masked_by(trained, layout):
        nats = trained.model(input_ids=tokens, labels=tokens).loss
    assert float(nats) == pytest.approx(loss["repaired"], abs=5e-3)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
def test_a_run_killed_while_it_repairs_ends_as_one_that_was_not(tiny_dense, text_file, tmp_path):
    repair = {"repair_tokens": 2000, "repair_epochs": 1}
    options = {**TINY_CONVERT, "data": text_file, "steps": 0, **repair}
    dense = tiny_dense("llama", num_hidden_layers=4)
    whole = TinyRun("convert", dense, tmp_path / "whole", options)
    assert run([*whole.command(), "--repair"]) == 0
    killed = whole.at(tmp_path / "killed")
    process = Forked([*killed.command(), "--repair"])
    finished = killed.folder / "4_repair/checkpoints/00000.safetensors"
    assert process.kill_when(finished.exists), process.said()
    assert not (killed.folder / "4_repair/model").exists()
    assert run([*killed.command(), "--repair"]) == 0
    assert killed.tensors() == whole.tensors()


def test_what_cannot_be_repaired_is_refused_in_one_line(
    command, dense_of, layout_of, text, text_file, tmp_path
):
    dense = dense_of("llama")
    layout = layout_of(dense, 6, active_experts=2)
    for experts, config, blocks, words in [
        (layout, RepairConfig(repair_active_experts=(7,)), text, "Choose 1 to 6"),
        (layout, RepairConfig(), TokenBlocks(text.tokens_BT[:1]), "a repair needs two"),
    ]:
        with pytest.raises(Exception, match=words):
            repair(dense, experts, blocks, config, folder=tmp_path)
    options = {"recipe": "quickstart", "data": text_file, "repair": []}
    refused = command("convert", "embedded", tmp_path / "run", **options, repair_active_experts=49)
    assert "Choose 1 to 48" in refused.refusal()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_several_ranks_are_refused_in_one_line(finished, tmp_path):
    options = ["--train", "repair"]
    ended = torchrun(2, "-m", "dotmoe", "finetune", finished.folder, tmp_path / "out", *options)
    assert ended.returncode != 0
    errors = [line for line in ended.stderr.splitlines() if line.startswith("dotmoe: error: ")]
    assert len(errors) == 1
    assert "a repair runs in one process" in errors[0]
    assert not (tmp_path / "out").exists()
