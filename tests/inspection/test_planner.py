"""Plans: sharded bytes beside FSDP2's own, the published figures, and what must grow or shrink."""

import pytest
import torch
import torch.distributed as dist
from inspected_models import inspection, llama_3_8b, sizes, tiny
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dotmoe.inspection import FinetuneSize, Machines, RunSize
from dotmoe.inspection.memory import (
    Placement,
    affinity_entries,
    frozen_bytes,
    gathered_parameters,
)
from dotmoe.inspection.planner import USABLE_SHARE, Task, plans
from dotmoe.inspection.step_time import finetune_work
from dotmoe.models.family import family_of
from dotmoe.parameters import meta_model

RANKS = 8


def planned(config, *, finetune=None, run=None, **machines):
    return plans(sizes(config), run or RunSize(), Machines(**machines), finetune)


def test_a_shard_is_as_large_as_that_of_fsdp():
    config = llama_3_8b()
    model = meta_model(config).to(torch.bfloat16)
    layers = family_of(config).layers(model)
    found = sizes(config)
    assert found.layer_parameters == sum(p.numel() for p in layers[0].parameters())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        real = sum(parameter.to_local().nbytes for parameter in model.parameters())
    finally:
        dist.destroy_process_group()
    held = frozen_bytes(found, Placement(ranks=RANKS, sharded=True))
    assert held - 2 * gathered_parameters(found) == real


@pytest.mark.parametrize(("ranks", "layers"), [(1, 2), (2, 1), (3, 1)])
def test_affinities_are_divided_by_layer(ranks, layers):
    found = sizes(tiny(), experts=16)
    assert affinity_entries(found, Placement(ranks=ranks)) == layers * 256 * 16


def test_the_papers_alignment_takes_less_than_its_three_hours_on_eight_h100():
    (plan,) = planned(llama_3_8b(), gpu="h100", gpus=8)
    assert plan.tokens == 458_752_000
    # At the peak of eight H100 and nothing but products: 0.73 hours.
    assert 0.8 < plan.hours < 3
    assert plan.gpu_hours == pytest.approx(8 * plan.hours)


@pytest.mark.parametrize(
    ("gpu", "gpus", "nodes", "batch_size", "published"),
    [("h100", 8, 1, 16, 5_762), ("a100", 8, 8, 64, 2_904)],
)
def test_published_dense_training_is_predicted_within_25_percent(
    gpu, gpus, nodes, batch_size, published
):
    # Llama 3 8B, sequences of 8,192, by torchtitan; it checkpoints some activations, so its speed
    # is between those of all and of none. All experts are on: the work is the dense model's.
    found = sizes(llama_3_8b(), experts=2, active_experts=2)
    run = RunSize(steps=1, batch_size=batch_size, micro_batch_size=1, seq_len=8_192)
    machines = Machines(gpu=gpu, gpus=gpus, nodes=nodes)
    (plan,) = plans(found, run, machines, FinetuneSize())
    speeds = {c.checkpointing: c.tokens_per_s / gpus / nodes for c in plan.choices if c.sharded}
    assert 0.75 * speeds[True] < published < 1.25 * speeds[False]
    assert speeds[False] < 2 * speeds[True]


def test_a_model_that_fits_is_whole_and_a_larger_one_is_sharded():
    (small,) = planned(llama_3_8b(), gpu="h100", gpus=8)
    assert small.choice.way == "whole"
    wide = llama_3_8b(num_hidden_layers=320)
    (large,) = planned(wide, gpu="h100", gpus=8)
    assert large.choice.sharded
    (alone,) = planned(wide, gpu="h100", gpus=1)
    assert alone.choice is alone.hours is alone.gpu_hours is None
    assert 1 < alone.gpus_needed <= 8
    (enough,) = planned(wide, gpu="h100", gpus=alone.gpus_needed)
    (fewer,) = planned(wide, gpu="h100", gpus=alone.gpus_needed - 1)
    assert enough.choice is not None
    assert fewer.choice is None


@pytest.mark.parametrize("size", [None, FinetuneSize()])
def test_the_micro_batch_is_the_largest_that_fits(size):
    config, run = llama_3_8b(), RunSize(batch_size=512, micro_batch_size=1, device="cuda")
    (plan,) = planned(config, finetune=size, run=run, gpu="h100", gpus=8)
    task, room = Task(sizes=sizes(config), run=run, size=size), USABLE_SHARE * 80e9
    for choice in (choice for choice in plan.choices if choice.fits):
        assert sum(choice.memory.values()) <= room
        placement = Placement(ranks=8, sharded=choice.sharded)
        more = choice.micro_batch_size + 1
        needed = task.memory(placement, more, checkpointing=choice.checkpointing)
        assert sum(needed.values()) > room or choice.micro_batch_size == 64


def test_more_gpus_and_faster_ones_take_less_time_and_slow_links_cost():
    config = llama_3_8b()
    hours = [planned(config, gpu="h100", gpus=n)[0].hours for n in (1, 2, 4, 8)]
    assert hours == sorted(hours, reverse=True)
    assert planned(config, gpu="b200", gpus=8)[0].hours < hours[-1]
    one, two = (planned(config, gpu="h100", gpus=8 // n, nodes=n)[0] for n in (1, 2))
    reducing = [plan.choice.communication["reducing gradients"] for plan in (one, two)]
    assert 0 < reducing[0] < reducing[1]
    assert not any(planned(config, gpu="h100", gpus=1)[0].choice.communication.values())


def test_communication_by_hand():
    (plan,) = planned(llama_3_8b(), gpu="h100", gpus=8)
    sharded = plan.choices[1]
    gathering, reducing = sharded.communication.values()
    layers = 2 * (8_030_261_248 - 2 * 128_256 * 4_096 - 4_096)
    micro_batches = -(-8 // sharded.micro_batch_size)
    assert gathering == pytest.approx(3 * micro_batches * layers * 7 / 8 / (0.7 * 450e9))
    plan_bytes, routers = 4 * 32 * 14_336 * 112, 4 * 32 * 112 * 4_096
    said = plan_bytes + 8 * 32 * 14_336 + 2 * routers
    assert reducing == pytest.approx(said * 7 / 8 / (0.7 * 450e9))


def test_only_active_experts_cost_products_in_finetuning():
    run, size = RunSize(batch_size=1, micro_batch_size=1), FinetuneSize(train="router")
    quarter, half = (
        finetune_work(sizes(llama_3_8b(), active=a), run, size=size, checkpointing=False)
        for a in (0.25, 0.5)
    )
    more = half["forward"].products - quarter["forward"].products
    assert more == 2 * 2_048 * 3 * 4_096 * 14_336 * 32 // 4


def test_finetuning_has_its_own_budget():
    config = llama_3_8b()
    found = inspection(config, machines=Machines(task="finetune", gpu="h100", gpus=8))
    (plan,) = found.plans
    assert (plan.task, plan.tokens) == ("finetune", 4_578 * 128 * 2_048)
    assert inspection(config, RunSize(steps=0)).plans == ()
