"""A GPU computes what the CPU computes.

They import only what a machine for GPUs has beside PyTorch: neither gguf nor POT, for example.
"""

import copy
import os
from dataclasses import replace

import pytest
import torch

from dotmoe.method.config import RepairConfig
from dotmoe.method.repair import repair
from dotmoe.method.transport import balanced_plan, greedy_assignment
from dotmoe.models import on_disk
from dotmoe.models.load import describe_dense
from dotmoe.text.blocks import TokenBlocks
from runs import affinity

GPU = os.environ.get("TEST_GPU", "cuda")
"""The device under test; a rehearsal names the CPU."""


@pytest.fixture
def text():
    """Blocks of 32 tokens, each a walk through 16 letters with steps of its own."""
    start, step = torch.randint(2, 200, (2, 41, 1))
    return TokenBlocks((2 + (start + step * torch.arange(32) ** 2) % 16).int())


@pytest.mark.gpu
def test_a_gpu_repairs_as_the_cpu_does(dense_of, layout_of, text, tmp_path):
    dense, config = dense_of("llama"), RepairConfig(repair_tokens=960, repair_epochs=2)
    errors = []
    for name, place in (("one", "cpu"), ("other", GPU)):
        there = replace(dense, model=copy.deepcopy(dense.model).to(place))
        found = repair(there, (layout_of(dense),), text, config, seed=0, folder=tmp_path / name)
        errors.append([layer["heldout_error"] for layer in found["layers"]])
    assert errors[1] == pytest.approx(errors[0], rel=0.02)


@pytest.mark.gpu
def test_a_gpu_gives_the_plan_the_gradient_and_the_rounding_of_the_cpu():
    found = []
    for place in ("cpu", GPU):
        leaf_NE = affinity(11_008, 86, std=0.3).to(place).requires_grad_()
        plan_NE = balanced_plan(leaf_NE, capacity=128, tau=0.1).entries
        (slope_NE,) = torch.autograd.grad(plan_NE, leaf_NE, affinity(11_008, 86, seed=1).to(place))
        of_cpu_NE = found[0][0] if found else plan_NE.detach()
        expert_N = greedy_assignment(of_cpu_NE.to(place), capacity=128)
        found.append([each.detach().cpu() for each in (plan_NE, slope_NE, expert_N)])
    (plan_NE, slope_NE, expert_N), mine = found
    torch.testing.assert_close(mine[0], plan_NE, atol=1e-4, rtol=0)
    assert (mine[1] - slope_NE).norm() <= 1e-3 * slope_NE.norm()
    assert torch.equal(mine[2], expert_N)


@pytest.mark.gpu
def test_weights_are_streamed_to_a_gpu(tiny_dense, exported, monkeypatch):
    monkeypatch.setattr(on_disk, "KEPT_BYTES", 0)  # else tiny models stay in memory
    source = describe_dense(str(tiny_dense("llama", dtype="bfloat16")))
    dense = on_disk.on_disk(source, torch.device(GPU), torch.bfloat16)
    assert exported(dense).record.problems == []
    assert dense.device.type == GPU
