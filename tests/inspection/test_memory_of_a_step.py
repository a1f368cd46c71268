"""Predicted peak memory of an alignment step. Oracle: what PyTorch's allocator handed out."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dotmoe.align import AlignConfig, Alignment
from dotmoe.data import TokenBlocks
from dotmoe.granularity import ExpertsConfig, resolve
from dotmoe.inspection.costs import RunSize, alignment_memory, sizes_of, total
from dotmoe.load import LoadConfig, load_dense
from dotmoe.moe.assignment import AlignState, AssignmentConfig
from dotmoe.moe.masked import masked
from dotmoe.moe.units import recomputing
from dotmoe.parameters import count_parameters

E, K, ROWS, LENGTH = 16, 4, 4, 128
CHANGES = {
    "activations": {"num_hidden_layers": 4, "intermediate_size": 512},
    "logits": {"vocab_size": 16_384},
}


def one_step(dense, *, checkpointing):
    """Bytes alive at most and at the end of a step, on top of what was there before it."""
    widths = dense.widths
    state = AlignState(
        affinity_LNE=torch.randn(widths.layers, widths.ffn, E),
        router_LED=torch.randn(widths.layers, E, widths.model),
        step=0,
    )
    blocks = TokenBlocks(torch.randint(2, 258, (2 * ROWS, LENGTH), dtype=torch.int32))
    config = AlignConfig(batch_size=ROWS, micro_batch_size=ROWS)
    split = resolve(ExpertsConfig(experts=E, active_experts=K), widths.ffn)
    task = Alignment(
        dense, blocks, state, split, config, AssignmentConfig(), warmup_steps=0, seed=0
    )
    optimizer = torch.optim.AdamW([task.assignment.affinity_LNE, task.assignment.router_LED])

    def step(number):
        task.accumulate_gradients(number)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with masked(dense, task.routing), recomputing(dense, checkpointing):
        step(0)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step(1)
    alive = most = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most, alive


@pytest.fixture(params=CHANGES)
def dense(request, tiny_dense):
    folder = tiny_dense("llama", **CHANGES[request.param])
    return load_dense(str(folder), LoadConfig(device="cpu"))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_of_a_step_is_predicted_within_15_percent(dense, checkpointing):
    most, _ = one_step(dense, checkpointing=checkpointing)
    split = resolve(ExpertsConfig(experts=E, active_experts=K), dense.widths.ffn)
    sizes = sizes_of(
        dense.config,
        dense.family.traits(dense.config),
        split,
        count_parameters(dense.config, dense.family, split),
        stored=torch.float32,
        written=torch.float32,
        bytes_held=4,
    )
    run = RunSize(steps=1, batch_size=ROWS, seq_len=LENGTH, micro_batch_size=ROWS, device="cpu")
    before = sum(p.nbytes for p in dense.model.parameters()) + 3 * 4 * sizes.trainables
    predicted = total(alignment_memory(sizes, run, checkpointing=checkpointing))
    assert predicted == pytest.approx(before + most, rel=0.15)


def test_recomputed_activations_do_not_outlive_the_step(dense):
    _, left = one_step(dense, checkpointing=True)
    assert left < ROWS * LENGTH * 4 * dense.widths.model
