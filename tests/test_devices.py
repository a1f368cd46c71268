"""Stages on a device that is not the CPU. Oracle: the same stage on the CPU."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dotmoe.method.align import Alignment
from dotmoe.method.calibrate import calibrate
from dotmoe.method.config import (
    AlignConfig,
    AssignmentConfig,
    CalibrateConfig,
    FinetuneConfig,
    RepairConfig,
)
from dotmoe.method.extract import extract
from dotmoe.method.finetuning import Finetuning, Student
from dotmoe.method.granularity import Granularity
from dotmoe.method.masked import masked
from dotmoe.method.repair import repair
from dotmoe.method.transport import greedy_assignment
from dotmoe.models.load import describe_dense
from dotmoe.run.provenance import provenance
from dotmoe.text.blocks import TokenBlocks
from dotmoe.training.loop import adamw, global_norm, update
from stand_in_device import StandInTensor, crossings, stand_in_device

SPLIT = Granularity(num_experts=12, expert_size=8, active_experts=3)
HEADS = Granularity(num_experts=4, expert_size=1, active_experts=2, target="attention")
STEP = {"batch_size": 4, "micro_batch_size": 2, "activation_checkpointing": True}
CPU = torch.device("cpu")


def test_hardware_is_what_computed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU at {device}")
    assert provenance(0, "cpu")["hardware"].startswith("CPU, ")
    assert provenance(0, "auto")["hardware"] == "a GPU at cuda"


def stepped(task):
    """Metrics of a training step, and its parameters after it."""
    optimizer = adamw(task)
    metrics = task.accumulate_gradients(0)
    update(optimizer, 1.0, global_norm(optimizer), 1.0)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return metrics, [p.detach().cpu() for p in parameters]


@pytest.fixture
def dense(dense_of):
    """A function that copies a dense model to a device."""

    def make(device, **options):
        dense = dense_of("llama", **options)
        return replace(dense, model=dense.model.to(device))

    return make


def aligned(device, dense, blocks, *, start, solver, split=SPLIT):
    dense = dense(device, num_hidden_layers=1)
    config, assignment = AlignConfig(**STEP), AssignmentConfig(solver=solver)
    state = calibrate(
        dense, blocks, split, CalibrateConfig(start=start), AssignmentConfig(), seed=0
    )
    task = Alignment(dense, blocks, (state,), (split,), config, assignment, seed=0)
    with masked(dense, task.maskings):
        metrics, learned = stepped(task)
    layout = extract(task.learned()[0], split, assignment)
    return metrics, [*learned, layout.expert_of_neuron_LN, layout.router_LED]


def finetuned(device, dense, blocks, *, layout, **options):
    described = describe_dense(dense(CPU).source)
    config = FinetuneConfig(**STEP, kl_weight=1.0, **options)
    alone = SimpleNamespace(device_type=device.type, size=lambda: 1)
    student = Student(described, layout, config, alone, seed=0)
    places = {tensor.device.type for tensor in (*student.parameters(), *student.buffers())}
    assert places == {device.type}
    task = Finetuning(student, dense(device), blocks, config, seed=0)
    return stepped(task)


def repaired(device, dense, blocks, *, layout, folder):
    config = RepairConfig(repair_epochs=1, repair_tokens=192)
    folder = folder / device.type
    folder.mkdir()
    metrics = repair(dense(device), (layout,), blocks, config, seed=0, folder=folder)
    return {str(each["layer"]): each["heldout_error"] for each in metrics["layers"]}, []


@pytest.mark.parametrize(("start", "solver", "split"), [
    ("data", "newton", SPLIT), ("random", "sinkhorn", SPLIT), ("data", "newton", HEADS),
])  # fmt: skip
def test_align(start, solver, split, both):
    both(aligned, start=start, solver=solver, split=split)


@pytest.mark.parametrize("what", ["everything", "experts", "lora"])
def test_finetune(what, both, layout_of, dense):
    layout = layout_of(dense(CPU), 6, active_experts=2, shared_size=24)
    both(finetuned, layout=layout, train=what)


def test_repair(both, layout_of, dense, tmp_path):
    # Training amplifies the rounding of attention, which is another kernel there.
    both(repaired, within=0.02, layout=layout_of(dense(CPU)), folder=tmp_path)


def test_steps_of_a_repair_neither_wait_nor_copy(
    layout_of, dense, tokens_BT, tmp_path, monkeypatch
):
    """With the streams on the device, a pass crosses as often in many steps as in few.

    Each pass moves its order to the device; nothing else crosses until it is over.
    """
    monkeypatch.setattr("dotmoe.method.repair.streams.has_room", lambda device, num_bytes: True)
    blocks, counts = TokenBlocks(tokens_BT.int()), {}
    layout = layout_of(dense(CPU), 6, active_experts=2, shared_size=24)
    for epochs, batch in ((1, 512), (1, 16), (3, 512), (3, 16)):
        monkeypatch.setattr("dotmoe.method.repair.ffn_training.BATCH", batch)
        config = RepairConfig(repair_epochs=epochs, repair_tokens=192)
        with stand_in_device() as device:
            folder = tmp_path / f"{epochs}-{batch}"
            with crossings() as seen:
                found = repair(dense(device), (layout,), blocks, config, seed=0, folder=folder)
            counts[epochs, batch] = len(seen)
        assert all("kept" in layer for layer in found["layers"])
    assert counts[1, 16] == counts[1, 512]
    assert counts[3, 16] == counts[3, 512] == counts[1, 512] + 2 * len(found["layers"])


@pytest.fixture
def both(dense, tokens_BT):
    """Runs a stage here and on the stand-in and compares what it returns."""

    def run(stage, within=1e-4, **options):
        blocks = TokenBlocks(tokens_BT.int())
        metrics, tensors = stage(CPU, dense, blocks, **options)
        with stand_in_device() as device:
            others, away = stage(device, dense, blocks, **options)
        assert others == pytest.approx(metrics, rel=within, abs=1e-5)
        for one, other in zip(tensors, away, strict=True):
            assert not isinstance(other, StandInTensor)
            torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5)

    return run


def test_a_tensor_left_on_the_host_is_an_error():
    with stand_in_device() as device:
        layer, x = nn.Linear(2, 2).to(device), torch.ones(3, 2)
        layer(x.to(device)).sum().backward()
        assert layer.weight.grad.tolist() == [[3.0, 3.0]] * 2
        with pytest.raises(RuntimeError, match="mixes"):
            layer(x)
        with pytest.raises(RuntimeError, match="mixes"):
            x[torch.zeros(1, dtype=torch.long, device=device)]


EACH_STEP = {
    "scoring.hidden_states": 2 * 2,  # Transformers' look for packed sequences, in every forward
    "objective.accumulate_gradients": 1,  # the figures of the step
}
"""How often the host waits for the device in a step of two micro-batches with a teacher."""
ASSIGNMENT = {
    "plan.extremes_of": 2,  # of affinities and of the plan: no NaN is solved or rounded
    "newton.balanced_plan": 1,  # potentials of the step before
    "newton._write_gradient": 2,  # two small sums of all layers, whose systems the host solves
}
DECIDING = {"newton.gradient", "newton.factored", "plan.refused_rows"}
"""What waits as often as the numbers need: a pass, its matrix, a round of proposals."""


def waits_of(task):
    """How often a second step waits, by function."""
    optimizer = adamw(task)
    for _ in range(2):
        with crossings() as seen:
            task.accumulate_gradients(0)
            update(optimizer, 1.0, global_norm(optimizer), 1.0)
    return Counter(each.function for each in seen if each.waits)


@pytest.mark.parametrize("solver", ["newton", "sinkhorn"])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_step_of_alignment_waits_only_to_decide(layers, solver, dense, tokens_BT):
    with stand_in_device() as device:
        dense, blocks = dense(device, num_hidden_layers=layers), TokenBlocks(tokens_BT.int())
        config, how = AlignConfig(**STEP), AssignmentConfig(solver=solver)
        state = calibrate(dense, blocks, SPLIT, CalibrateConfig(start="random"), how, seed=0)
        task = Alignment(dense, blocks, (state,), (SPLIT,), config, how, seed=0)
        with masked(dense, task.maskings):
            seen = waits_of(task)
    counts = {name: count for name, count in seen.items() if name not in DECIDING}
    is_newton = solver == "newton"
    solving = {name: n for name, n in ASSIGNMENT.items() if is_newton or "newton" not in name}
    assert counts == EACH_STEP | solving
    assert seen["plan.refused_rows"] % 2 == 1  # two in every round, one to see the end
    if is_newton:
        assert layers <= seen["newton.gradient"] <= 5 * layers
    else:
        assert seen["newton.gradient"] == 0
    assert seen["newton.factored"] <= seen["newton.gradient"]


def test_rounding_waits_twice_a_round_and_once_to_see_the_end():
    """All four neurons want the first of two experts, and two are refused once."""
    with stand_in_device() as device:
        plan_NE = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]]).to(device)
        with crossings() as seen:
            expert_N = greedy_assignment(plan_NE, capacity=2)
    waiting = [each.function for each in seen if each.waits]
    assert waiting == ["plan.extremes_of"] + 3 * ["plan.refused_rows"]
    assert expert_N.cpu().tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("what", ["everything", "experts", "lora"])
def test_a_step_of_finetuning_waits_for_its_figures_alone(what, dense, layout_of, tokens_BT):
    layout = layout_of(dense(CPU), 6, active_experts=2, shared_size=24)
    config = FinetuneConfig(**STEP, kl_weight=1.0, train=what)
    with stand_in_device() as device:
        described, blocks = describe_dense(dense(CPU).source), TokenBlocks(tokens_BT.int())
        alone = SimpleNamespace(device_type=device.type, size=lambda: 1)
        student = Student(described, layout, config, alone, seed=0)
        seen = waits_of(Finetuning(student, dense(device), blocks, config, seed=0))
    assert seen == EACH_STEP
