"""Repair of W_down and W_O. Oracles: NumPy's least squares, the dense model."""

import copy
import json
import shutil
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dotmoe.cli import run
from dotmoe.common.distributed import process_group
from dotmoe.common.errors import UserError
from dotmoe.export.record import ExportRecord
from dotmoe.measure.report import RunResults
from dotmoe.method.config import RepairConfig
from dotmoe.method.granularity import Granularity
from dotmoe.method.layout import ALWAYS_ON, DROPPED, ExpertLayout
from dotmoe.method.masked import masked_by
from dotmoe.method.repair import repair, repair_tokens
from dotmoe.method.repair.refit import RIDGES, NormalEquations, NormalEquationsByExpert, refit
from dotmoe.models import on_disk
from dotmoe.models.config import LoadConfig
from dotmoe.models.load import describe_trained, left_on_disk, load_described
from dotmoe.models.targets import TARGETS
from dotmoe.run.finished import FinishedRun
from dotmoe.text.blocks import TokenBlocks
from export.comparison import logits_of
from export.test_dotmoe import OWN
from heads.families import FAMILIES, HEADS
from runs import TINY_CONVERT, Forked, TinyRun, on_ranks, passed, slow_but

TRAINED = ("llama", "granite", "olmo2", "phi3")
SCALED = {"granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5}}
LEVELS = ("frozen", "repaired", "finetuned")


def walks(rows):
    """Blocks of 32 tokens, each a walk through 16 letters with steps of its own."""
    start, step = torch.randint(2, 200, (2, rows, 1))
    return TokenBlocks((2 + (start + step * torch.arange(32) ** 2) % 16).int())


@pytest.fixture
def text():
    return walks(41)


def made(dense, folder, **options):
    """The model with what a repair has written."""
    return load_described(describe_trained(dense, folder), LoadConfig(device="cpu", **options))


@torch.no_grad()
def around_projection(dense, target, rows):
    """What the output projection of the only layer reads, and the residual stream behind it."""
    layer = dense.model.model.layers[0]
    modules = {"ffn": layer, "attention": layer.post_attention_layernorm}
    modules["output"] = dense.family.output(layer, TARGETS[target])
    seen = passed(modules, lambda: dense.model(input_ids=rows))
    behind = seen["ffn"][1] if target == "ffn" else seen["attention"][0]
    return [each.view(*rows.shape, -1).double().numpy() for each in (seen["output"][0], behind)]


@pytest.mark.parametrize(
    ("target", "family"),
    [
        *(("ffn", family) for family in ("llama", "granite", "phi3")),
        *(("attention", family) for family in ("llama", "granite", "qwen2")),
    ],
)
def test_a_layer_is_the_ridge_regression_of_what_is_missing(
    target, family, dense_of, layout_of, text, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda how: None)  # exact products
    dense = dense_of(family, num_hidden_layers=1, **FAMILIES[family])
    if target == "ffn":
        layout = layout_of(dense, 6, active_experts=2, shared_size=24)
    else:
        layout = layout_of(dense, **HEADS)
    config = RepairConfig(repair_tokens=30 * 32, repair_epochs=0)
    found = repair(dense, (layout,), text, config, seed=0, folder=tmp_path)
    rows = text.tokens_BT[torch.arange(30) * 41 // 30].long()  # spread over the text
    _, wanted = around_projection(dense, target, rows)
    with masked_by(dense, layout):
        hidden, reached = around_projection(dense, target, rows)
    size = (wanted**2).mean(2)
    root = np.sqrt(np.minimum(np.median(size) / size, 10))[..., None]
    missing = root * (wanted - reached) / getattr(dense.config, "residual_multiplier", 1.0)
    hidden = root * hidden

    def solved(ridge, rows):
        z, r = (each[rows].reshape(-1, each.shape[2]) for each in (hidden, missing))
        penalty = np.sqrt(ridge * (z**2).sum(0).mean()) * np.eye(z.shape[1])
        zeros = np.zeros((z.shape[1], r.shape[1]))
        return np.linalg.lstsq(np.vstack([z, penalty]), np.vstack([r, zeros]))[0]

    is_heldout = np.arange(30) % 8 == 7
    z, r = hidden[is_heldout], missing[is_heldout]
    errors = [((z @ solved(ridge, ~is_heldout) - r) ** 2).sum() / (r**2).sum() for ridge in RIDGES]
    (layer,) = found["layers"]
    assert layer.get("target", "ffn") == target
    assert layer["ridge"] == RIDGES[int(np.argmin(errors))]
    assert layer["heldout_error"] == pytest.approx(min(errors), rel=1e-3)
    assert min(errors) < 0.8
    assert found["tokens"] == 30 * 32
    assert layer["kept"] == 0.8
    change, before = 0.8 * solved(layer["ridge"], np.arange(30)), dense.model.state_dict()
    name = TARGETS[target].output_tensor(0)
    after = made(dense, tmp_path).model.state_dict()
    actual = (after[name].double() - before[name].double()).T.numpy()
    assert np.abs(actual - change).max() < 2e-3 * np.abs(change).max()
    assert [key for key in before if not torch.equal(before[key], after[key])] == [name]


def test_a_refit_that_held_out_rows_do_not_gain_from_is_zero():
    """Held-out rows lack the opposite of what the others lack."""
    hidden_TN, missing_TD = torch.randn(50, 6), torch.randn(50, 4)
    sides = {}
    for sign in (1, -1):
        sides[sign] = NormalEquationsByExpert(torch.zeros(6, dtype=torch.long), 4)
        sides[sign].add(hidden_TN, sign * missing_TD, torch.ones(50))
    output = torch.nn.Linear(6, 4)
    plain = output.weight.detach().double()
    weight_DN, *found = refit(output, sides[1], sides[-1])
    assert torch.equal(weight_DN, plain)
    assert found == [None, 1.0]
    weight_DN, ridge, error = refit(output, sides[1], sides[1])
    assert ridge in RIDGES
    assert error < 1
    assert not torch.equal(weight_DN, plain)


@pytest.mark.parametrize("steps_away", [0, 1, 2])
def test_from_the_ridge_of_the_layer_before_fewer_solutions_find_the_same(steps_away, monkeypatch):
    torch.manual_seed(3)
    hidden_TN, true_ND = torch.randn(80, 40), torch.randn(40, 4)
    missing_TD = hidden_TN @ true_ND + 4 * torch.randn(80, 4)
    output = torch.nn.Linear(40, 4)

    def found(near=None):
        of_one = torch.zeros(40, dtype=torch.long)
        fitted, heldout = (NormalEquationsByExpert(of_one, 4) for _ in range(2))
        fitted.add(hidden_TN[:50], missing_TD[:50], torch.ones(50))
        heldout.add(hidden_TN[50:], missing_TD[50:], torch.ones(30))
        return refit(output, fitted, heldout, near)

    everywhere_DN, *chosen = found()
    place = RIDGES.index(chosen[0])
    assert 2 <= place < len(RIDGES) - 2
    solved, tried = NormalEquations.solved, []
    monkeypatch.setattr(NormalEquations, "solved", lambda *a: tried.append(a) or solved(*a))
    near_DN, *again = found(RIDGES[place - steps_away])
    assert again == chosen
    assert torch.equal(near_DN, everywhere_DN)
    assert len(tried) <= 4 + steps_away  # with the last, to all tokens


@pytest.mark.parametrize("kind", [NormalEquations, NormalEquationsByExpert])
def test_sums_over_tokens_are_those_written_out(kind, monkeypatch):
    """No expert of the third token runs; columns come in three groups."""
    monkeypatch.setattr("dotmoe.method.repair.refit._COLUMNS", 3)
    torch.manual_seed(4)
    expert_of_N = torch.tensor([2, 0, 1, 0, 2, 2, 1, 0])
    runs_TE = torch.tensor([[1, 0, 1], [0, 1, 1], [0, 0, 0], [1, 1, 0], [0, 0, 1]])
    z = torch.randn(5, 8) * runs_TE[:, expert_of_N]
    r, w = torch.randn(5, 3), torch.rand(5)
    sums = kind(expert_of_N, 3)
    for rows in (slice(0, 2), slice(2, 5)):
        sums.add(z[rows], r[rows], w[rows])
    z, r = (each.double() * w.double()[:, None].sqrt() for each in (z, r))
    penalty = 0.1 * (z**2).sum(0).mean() * torch.eye(8, dtype=torch.float64)
    expected_ND = torch.linalg.solve(z.T @ z + penalty, z.T @ r)
    change_ND = sums.solved(0.1)
    torch.testing.assert_close(change_ND, expected_ND, rtol=1e-5, atol=1e-6)
    left = ((z @ expected_ND - r) ** 2).sum() / (r**2).sum()
    assert sums.error(change_ND) == pytest.approx(float(left), rel=1e-5)


def test_training_that_held_out_rows_do_not_gain_from_is_dropped(
    dense_of, layout_of, text, tmp_path, monkeypatch
):
    """Then the refit is kept, which changes the output projection alone."""
    monkeypatch.setattr("dotmoe.method.repair.ffn_training._RATE", 1e4)
    dense = dense_of("llama")
    before = {name: value.clone() for name, value in dense.model.state_dict().items()}
    config = RepairConfig(repair_tokens=960, repair_epochs=2)
    found = repair(dense, (layout_of(dense),), text, config, seed=0, folder=tmp_path)
    after = made(dense, tmp_path).model.state_dict()
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == {f"model.layers.{index}.mlp.down_proj.weight" for index in range(2)}
    assert all(layer["ridge"] and layer["heldout_error"] < 1 for layer in found["layers"])


@pytest.mark.parametrize("epochs", [0, 6])
def test_four_fifths_of_what_a_repair_changes_are_kept(
    epochs, dense_of, layout_of, text, tmp_path, monkeypatch
):
    """Layers are repaired behind whole changes, so another share is of the same changes."""
    dense, config = dense_of("llama"), RepairConfig(repair_tokens=960, repair_epochs=epochs)
    layout, before, changes = layout_of(dense, 6), dense.model.state_dict(), []
    for folder, kept in (("as it is", None), ("whole", 1.0)):
        if kept:
            monkeypatch.setattr("dotmoe.method.repair.by_layer._SHARE_OF_CHANGE", kept)
        repair(dense, (layout,), text, config, seed=0, folder=tmp_path / folder)
        after = made(dense, tmp_path / folder).model.state_dict()
        changes.append([after[name] - value for name, value in before.items() if "mlp" in name])
    for kept, whole in zip(*changes, strict=True):
        error = (kept - 0.8 * whole).abs().mean()
        assert float(error) <= 0.01 * float(whole.abs().mean())


def test_a_layer_of_an_earlier_version_counts_as_a_whole_change(
    dense_of, layout_of, text, tmp_path, monkeypatch
):
    """Its record has no share `kept`: the next layer is trained behind what the file holds."""
    monkeypatch.setattr("dotmoe.method.repair.by_layer._SHARE_OF_CHANGE", 1.0)
    dense, config = dense_of("llama"), RepairConfig(repair_tokens=960, repair_epochs=2)
    repair(dense, (layout_of(dense, 6),), text, config, seed=0, folder=tmp_path)
    first, second = sorted((tmp_path / "layers.parts").iterdir())
    expected = load_file(second / "weights.safetensors")
    record = json.loads((first / "repair.json").read_text())
    assert record.pop("kept") == 1
    (first / "repair.json").write_text(json.dumps(record))
    (first / "checksums.json").unlink()
    shutil.rmtree(second)
    monkeypatch.undo()
    repair(dense, (layout_of(dense, 6),), text, config, seed=0, folder=tmp_path)
    again, before = load_file(second / "weights.safetensors"), dense.model.state_dict()
    for name, whole in expected.items():
        torch.testing.assert_close(again[name], before[name].lerp(whole, 0.8))


@pytest.mark.parametrize(("target", "inputs"), [("ffn", 96), ("attention", 64)])
def test_a_repair_reads_40_tokens_for_each_input_by_default(target, inputs, dense_of):
    dense = dense_of("llama")
    split = Granularity(num_experts=4, expert_size=8, active_experts=2, target=target)
    assert repair_tokens(RepairConfig(), (split,), dense.config) == 40 * inputs


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
        out, config = tmp_path / str(epochs), RepairConfig(repair_tokens=9600, repair_epochs=epochs)
        layer = repair(dense, (layout,), training, config, seed=0, folder=out)["layers"][-1]
        assert all(torch.equal(before[name], v) for name, v in dense.model.state_dict().items())
        repaired = made(dense, out, dtype=dtype)
        kl.append(divergence(dense, repaired, layout, heldout))
        states, part = repaired.model.state_dict(), "mlp." if epochs else "mlp.down_proj."
        places = tuple(f"model.layers.{index}.{part}" for index in layout.moe_layers)
        changed = {name for name, value in before.items() if not torch.equal(states[name], value)}
        assert changed == {name for name in states if name.startswith(places)}
    assert kl[1] < 0.95 * kl[0], kl
    if is_trained:
        assert kl[2] < 0.9 * kl[1], kl
        assert layer["heldout_error"] < 1
        assert layer["ridge"] is None


@torch.no_grad()
def divergence(dense, other, layout, tokens):
    """KL to the dense model, nats a token."""
    truth = dense.model(input_ids=tokens).logits.float().log_softmax(-1)
    with masked_by(other, layout):
        found = other.model(input_ids=tokens).logits.float().log_softmax(-1)
    return float((truth.exp() * (truth - found)).sum(-1).mean())


@pytest.mark.parametrize("target", ["ffn", "attention"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_weights_on_disk_are_repaired_as_those_in_memory_are(
    family, target, dense_of, layout_of, text, tmp_path, monkeypatch
):
    """The next layer is repaired behind the repaired weights, not those that are on disk."""
    monkeypatch.setattr(on_disk, "KEPT_BYTES", 0)
    dense = dense_of(family, **FAMILIES[family])
    layout = layout_of(dense, 6)
    if target == "attention":
        layout = layout_of(dense, **HEADS)
    stored = left_on_disk(dense, LoadConfig(device="cpu"))
    config = RepairConfig(repair_tokens=960, repair_epochs=1)
    records = [
        repair(each, (layout,), text, config, seed=0, folder=tmp_path / each.weights)
        for each in (dense, stored)
    ]
    assert records[0] == records[1]
    one, other = (
        made(dense, tmp_path / each.weights).model.state_dict() for each in (dense, stored)
    )
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())
    assert all(bool(weight.isnan().all()) for weight in stored.model.parameters()), "left again"


def rounding_of_refit(inputs, ridge):
    """Share by which a change may differ if products add up in another order.

    Sums of so many products differ by some sqrt(inputs) 2^-24 of their size, and the solution by at
    most the condition of the penalised Gram matrix times that. Of its eigenvalues none is below
    `ridge`, and none above `inputs + ridge`, in units of its mean diagonal.
    """
    return inputs**0.5 * 2**-24 * (1 + inputs / ridge)


def repair_as_a_rank(*arguments):
    with process_group(torch.device("cpu")):
        repair(*arguments[:-1], seed=0, folder=arguments[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
@pytest.mark.parametrize(("family", "epochs"), [("llama", 0), ("phi3", 6), ("olmo2", 6)])
def test_ranks_that_divide_text_and_neurons_repair_as_one_does(
    family, epochs, dense_of, layout_of, text, tmp_path, monkeypatch
):
    """27 rows to fit and 3 held out; a pass is one step, so that both train on the same batches.

    Products are exact: a CPU that rounds their factors does so for some numbers of rows alone.
    """
    monkeypatch.setattr("dotmoe.method.repair.ffn_training.BATCH", 4096)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda how: None)  # exact products
    dense, config = dense_of(family), RepairConfig(repair_tokens=960, repair_epochs=epochs)
    layout = layout_of(dense, 6, active_experts=2, shared_size=18)  # 13 neurons an expert
    for expert_N in layout.expert_of_neuron_LN:
        expert_N[(expert_N == ALWAYS_ON).nonzero()[:3]] = DROPPED
    dropped_LN = layout.expert_of_neuron_LN == DROPPED
    layouts = (layout, layout_of(dense, **HEADS)) if family == "llama" else (layout,)
    work, folders = (dense, layouts, text, config), [tmp_path / n for n in "12"]
    repair(*work, seed=0, folder=folders[0])
    on_ranks(2, repair_as_a_rank, *work, folders[1])
    one, two = (json.loads((folder / "repair.json").read_text()) for folder in folders)
    assert one["tokens"] == two["tokens"] == 960
    bounds = {}
    for alone, divided in zip(one["layers"], two["layers"], strict=True):
        target = TARGETS[alone.get("target", "ffn")]
        if alone["ridge"]:
            output = target.output_tensor(alone["layer"])
            bounds[output] = rounding_of_refit(target.inputs(dense.config), alone["ridge"])
        for name in ("target", "ridge"):
            assert divided.pop(name, None) == alone.pop(name, None)
        assert divided == pytest.approx(alone, rel=2e-3)
        assert alone["heldout_error"] < 0.95
    before = dense.model.state_dict()
    alone, divided = (made(dense, folder).model.state_dict() for folder in folders)
    for name, weight in before.items():
        change, error = (weight - alone[name]).abs().mean(), (divided[name] - alone[name]).abs()
        # Adam moves each weight as far, though rounding may turn a gradient near zero: one in 200.
        assert float(error.mean()) <= bounds.get(name, 0.01) * float(change), name
        if "gate" in name or "up" in name:  # rows of phi3's are those of two projections
            kept = [
                each.unflatten(0, (-1, 96))[:, dropped_LN[int(name[13])]]
                for each in (weight, divided[name])
            ]
            assert torch.equal(*kept), "a dropped neuron has changed"


def test_with_all_experts_on_nothing_changes(dense_of, layout_of, text, tmp_path, monkeypatch):
    """Exact products lack some sqrt(96) 2^-24 of the output, where rounded factors may lack 2^-8.

    A ridge of 1e-3 or more makes a change at most 1 / (2 sqrt(1e-3)) = 16 times that large: 1e-5.
    """
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda how: None)  # exact products
    dense = dense_of("llama")
    layout = layout_of(dense, 6, active_experts=6)
    repair(dense, (layout,), text, RepairConfig(), seed=0, folder=tmp_path)
    repaired = made(dense, tmp_path).model.state_dict()
    for name, weight in dense.model.state_dict().items():
        torch.testing.assert_close(repaired[name], weight, rtol=0, atol=1e-4)


def test_frozen_repaired_and_finetuned_are_three_rows(finished, tmp_path, command):
    options = {name: value for name, value in finished.options.items() if name != "no_repair"}
    options |= {"steps": 0, "repair_tokens": 1000}
    tuning = {"steps": 4, "batch_size": 2}
    tuning |= {"scale_tokens": 128, "verify_tokens": 128}
    repaired = TinyRun("convert", finished.source, tmp_path / "repaired", options).made()
    tuned = command("finetune", repaired.folder, tmp_path / "tuned", **tuning)
    assert (tuned.status, [word in tuned.out for word in LEVELS]) == (0, [True] * 3)
    for made in (finished, repaired):
        card = (made.folder / "5_export/README.md").read_text()
        assert ("give back the dense model" in card) == (made is finished)
        assert ("with the repaired or finetuned model" in card) == (made is repaired)
    before, after = (RunResults(each).models for each in (repaired.folder, tmp_path / "tuned"))
    assert (list(before), list(after)) == (["dense", *LEVELS[:2]], ["dense", *LEVELS])
    loss = before["repaired"]["loss"]
    assert after["repaired"]["loss"] == loss
    record = ExportRecord.load(repaired.folder / "5_export")
    assert (record.problems, record.source) == ([], finished.source.name)
    layout = ExpertLayout.load(repaired.folder / "4_repair/layout.safetensors")
    described, cpu = FinishedRun(repaired.folder).described(), LoadConfig(device="cpu")
    trained, on_disk = load_described(described, cpu), left_on_disk(described, cpu)
    tokens = TokenBlocks.load(repaired.folder / "0_data/heldout.safetensors").tokens_BT.long()
    with torch.no_grad(), masked_by(trained, layout):
        nats = trained.model(input_ids=tokens, labels=tokens).loss
    assert float(nats) == pytest.approx(loss, abs=5e-3)
    assert torch.equal(*(logits_of(each.model, tokens) for each in (trained, on_disk)))
    weights, stored = trained.model.state_dict(), load_file(finished.source / "model.safetensors")
    ffns = {name for name, weight in stored.items() if not torch.equal(weight, weights[name])}
    assert ffns == {name for name in stored if ".mlp." in name}
    needed = sum(stored[name].nbytes for name in ffns)
    folder = repaired.folder / "4_repair"
    files = list(folder.glob("**/weights.safetensors"))
    assert sum(file.stat().st_size for file in files) < needed + 4096  # headers
    assert not (folder / "model").exists()
    assert command("analyse", folder.parent).status == 0


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
@pytest.mark.parametrize("damage", [None, "bit", "short", "gone"])
def test_a_run_killed_while_it_repairs_ends_as_one_that_was_not(
    damage, tiny_dense, text_file, tmp_path
):
    repair = {"repair": [], "repair_tokens": 1000, "repair_epochs": 1}
    options = {**TINY_CONVERT, "data": text_file, "steps": 0, **repair}
    dense = tiny_dense("llama", num_hidden_layers=3)
    whole = TinyRun("convert", dense, tmp_path / "whole", options)
    assert run(whole.command()) == 0
    killed = whole.at(tmp_path / "killed")
    process = Forked(killed.command())
    finished = killed.folder / "4_repair/layers.parts/00000_ffn"
    assert process.kill_when(finished.exists), process.said()
    assert not (killed.folder / "4_repair/repair.json").exists()
    weights = finished / "weights.safetensors"
    before = weights.stat().st_mtime_ns
    if damage == "gone":
        weights.unlink()
    elif damage is not None:
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content[:20] if damage == "short" else content)
    assert run(killed.command()) == 0
    assert killed.tensors() == whole.tensors()
    is_kept = weights.stat().st_mtime_ns == before
    assert is_kept == (damage is None), "a whole layer alone is not repaired again"


def test_what_cannot_be_repaired_is_refused(dense_of, layout_of, text, tmp_path, monkeypatch):
    dense, blocks = dense_of("llama"), TokenBlocks(text.tokens_BT[:1])
    with pytest.raises(UserError, match="a repair needs two"):
        repair(dense, (layout_of(dense),), blocks, RepairConfig(), seed=0, folder=tmp_path)
    monkeypatch.setattr("dotmoe.method.repair.by_layer.num_ranks", lambda: 9)
    with pytest.raises(UserError, match="experts have 8 neurons, but 9 ranks"):
        repair(dense, (layout_of(dense),), text, RepairConfig(), seed=0, folder=tmp_path)


@pytest.mark.parametrize("weights", ["memory", "disk"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_repair_that_is_stopped_leaves_the_model_as_it_was(
    error, weights, dense_of, layout_of, text, tmp_path
):
    """Also while somebody holds the exception, as a notebook does. It comes in the second layer."""
    dense, rows = dense_of("llama"), text.tokens_BT[:2].long()
    if weights == "disk":
        dense = left_on_disk(dense, LoadConfig(device="cpu"))
    layouts = (layout_of(dense, 6, active_experts=2), layout_of(dense, **HEADS))
    expected, before = logits_of(dense.model, rows), copy.deepcopy(dense.model.state_dict())
    config = RepairConfig(repair_tokens=960, repair_epochs=1)

    def stop(layer, *_):
        if layer == 2:
            raise error

    with pytest.raises(type(error)) as held:
        repair(dense, layouts, text, config, seed=0, folder=tmp_path, on_progress=stop)
    assert held.value is error
    assert len(list((tmp_path / "layers.parts").iterdir())) == 3  # one of the second layer
    after = dense.model.state_dict()
    for name, value in before.items():
        assert torch.equal(after[name], value)
    assert torch.equal(logits_of(dense.model, rows), expected)


@pytest.mark.parametrize("family", slow_but(("lfm2", "granitemoehybrid"), OWN))
def test_a_family_with_names_of_its_own_is_repaired(family, dense_of, layout_of, text, tmp_path):
    dense, rows = dense_of(family, **OWN[family]), text.tokens_BT[-8:].long()
    layout = layout_of(dense, 6, active_experts=2, shared_size=24)
    config = RepairConfig(repair_tokens=30 * 32, repair_epochs=2)
    repair(dense, (layout,), text, config, seed=0, folder=tmp_path)
    repaired = made(dense, tmp_path)
    assert divergence(dense, repaired, layout, rows) < divergence(dense, dense, layout, rows)
