"""Plans: sharded bytes beside FSDP2's own, the published figures, and what must grow or shrink."""

from dataclasses import replace

import pytest
from inspected_models import HERE, inspection, llama_3_8b, sizes, step

from document_tables.paper_models import paper_models
from dotmoe.measure.inspection.accelerators import ACCELERATORS
from dotmoe.measure.inspection.planner import (
    USABLE_SHARE,
    fit_to_memory,
    most_at_once,
    plan_step,
    products,
    traffic,
)
from dotmoe.measure.inspection.sizes import step_memory


def planned(config, task="align", **options):
    found = inspection(config, **{"gpu": "h100", "gpus": 8, **options})
    (made,) = (made for made in found["plans"] if made["task"] == task)
    return made | {"tokens": found["run"]["tokens"][task]}


@pytest.mark.parametrize(
    ("model", "gpus", "offloads"),
    [
        ("Qwen2.5-7B", 1, True),
        ("Qwen2.5-7B", 8, False),
        ("LLaMA-3-8B", 1, True),
        ("LLaMA-3-8B", 8, False),
        ("Qwen2.5-32B", 8, False),
    ],
)
def test_all_defaults_fit_gpus_of_80_gb(model, gpus, offloads):
    found = inspection(
        paper_models()[model], gpu="h100", gpus=gpus, repair=True, data=("text.txt",)
    )
    ways = {made["task"]: made["recommended"] for made in found["plans"]}
    assert all(ways.values())
    (conversion,) = found["conversions"]
    stages = {row["stage"] for row in conversion["stages"]}
    assert {row["stage"] for row in conversion["stages"] if row["fits"]} == stages >= {"repair"}
    counts = found["counts"]
    trained = counts["ffn_total"] + counts["routers"]
    assert ways["finetune"]["on_host"] == offloads * (14 * trained + 2 * counts["stored"])


@pytest.mark.parametrize(("model", "fits"), [("LLaMA-3-8B", True), ("Qwen2.5-32B", False)])
def test_a_model_writes_on_one_gpu_whole_however_many_there_are(model, fits):
    found = inspection(paper_models()[model], gpu="h100", gpus=8, repair=True)
    (conversion,) = found["conversions"]
    answers = conversion["stages"][0]
    assert (answers["stage"], answers["fits"]) == ("answers", fits)
    assert answers["memory"]["dense weights"] == 2 * found["counts"]["dense_total"]


def test_published_dense_training_is_predicted_within_25_percent():
    # Llama 3 8B, sequences of 8,192, by torchtitan; it checkpoints some activations, so its speed
    # is between those of all and of none. All experts are on: the work is the dense model's.
    dense = sizes(llama_3_8b(), experts=2, active_experts=2)
    one = step(dense, train="everything", batch_size=16, seq_len=8_192)
    found = plan_step(one, replace(ACCELERATORS["h100"], gpus=8), tokens=one.tokens)
    sharded = [choice for choice in found["choices"] if choice["sharded"]]
    speeds = {each["checkpointing"]: each["tokens_per_s"] / 8 for each in sharded}
    assert 0.75 * speeds[True] < 5_762 < 1.25 * speeds[False]
    assert speeds[False] < 2 * speeds[True]


def test_a_model_that_fits_is_whole_and_a_larger_one_is_sharded():
    assert planned(llama_3_8b())["recommended"]["way"] == "whole"
    wide = llama_3_8b(hidden_size=12_288, intermediate_size=43_008, num_attention_heads=96)
    assert planned(wide)["recommended"]["sharded"]
    alone = planned(wide, gpus=1)
    assert alone["recommended"] is alone["hours"] is alone["gpu_hours"] is None


def test_processes_of_one_cpu_wait_for_no_link():
    found = plan_step(step(sizes(llama_3_8b())), replace(HERE, gpus=2), tokens=1000)
    assert {each["parts"]["waiting for communication"] for each in found["choices"]} == {0.0}


@pytest.mark.parametrize("train", ["assignment", "everything"])
def test_the_micro_batch_is_the_largest_that_fits(train):
    one = step(sizes(llama_3_8b()), batch_size=512, train=train, ranks=8, sharded=True)
    most = most_at_once(one, ACCELERATORS["h100"])
    held = [
        sum(step_memory(replace(one, micro_batch_size=size)).values()) for size in (most, most + 1)
    ]
    assert 0 < held[0] <= USABLE_SHARE * 80e9 < held[1]


def test_more_gpus_and_faster_ones_take_less_time_and_slow_links_cost():
    hours = [planned(llama_3_8b(), gpus=n)["hours"] for n in (1, 2, 4, 8)]
    assert hours == sorted(hours, reverse=True)
    assert planned(llama_3_8b(), gpu="b200")["hours"] < hours[-1]
    slow, fast = (
        planned(llama_3_8b(), gpu=gpu, task="finetune", finetune_recipe="paper")["choices"][1][
            "parts"
        ]
        for gpu in ("l40s", "h100")
    )
    assert slow["waiting for communication"] > fast["waiting for communication"] == 0


def test_traffic_by_hand():
    found = sizes(llama_3_8b())
    one = step(found, ranks=8, sharded=True)
    layers = 2 * (8_030_261_248 - 2 * 128_256 * 4_096 - 4_096)
    assert traffic(one) == 3 * 2 * layers + 4 * 32 * 14_336 * 112  # two micro-batches
    tuned = replace(one, train="everything")
    assert traffic(tuned) == 2 * 2 * layers + 2 * 4 * found.counts.stored


def test_only_active_experts_cost_products_in_finetuning():
    quarter, half = (
        products(step(sizes(llama_3_8b(), active=a), batch_size=1, train="experts"))
        for a in (0.25, 0.5)
    )
    assert half["forward"] - quarter["forward"] == 2 * 2_048 * 3 * 4_096 * 14_336 * 32 // 4


@pytest.mark.parametrize(
    ("options", "command", "tokens"),
    [
        ({}, "finetune OUT OUT2", 240 * 4 * 512),
        ({"finetune_steps": 9}, "finetune OUT OUT2 --steps 9", 9 * 4 * 512),
        ({"train": "lora"}, "finetune OUT OUT2 --train lora", 240 * 4 * 512),
        (
            {"finetune_recipe": "paper"},
            "finetune OUT OUT2 --recipe paper --data FILE",
            4_578 * 128 * 2_048,
        ),
    ],
)
def test_a_finetuning_is_planned_as_its_command_runs(options, command, tokens):
    found = inspection(llama_3_8b(), gpu="h100", gpus=8, repair=True, **options)
    assert found["choices"][-1]["command"] == command
    assert found["run"]["tokens"]["finetune"] == tokens
    assert found["run"]["shown"] == ["align", "finetune"][: 1 + bool(options)]


def test_the_time_of_a_finetuning_has_that_of_the_answers_written_for_it():
    """As long as a conversion that writes as many tokens, and reads a text."""
    options = {"gpu": "h100", "gpus": 1, "repair": True, "heldout_answers": 0}
    own, read, other = (
        inspection(llama_3_8b(), **options | more)
        for more in ({}, {"data": (__file__,)}, {"answer_tokens": 240 * 4 * 512})
    )
    writing = other["conversions"][0]["stages"][0]
    assert writing["stage"] == "answers"
    hours = [found["choices"][-1]["hours"] for found in (own, read)]
    assert hours[0] - hours[1] == pytest.approx(writing["hours"])
    assert hours[1] == read["plans"][-1]["hours"]


def test_a_teacher_is_a_second_copy_that_runs_once():
    found = sizes(llama_3_8b())
    alone, taught = (step(found, train="everything", distils=flag) for flag in (False, True))
    memory = [step_memory(each) for each in (alone, taught)]
    assert memory[1]["teacher"] == 2 * 8_030_261_248
    assert "teacher" not in memory[0]
    forward = 2 * (8_030_261_248 - 128_256 * 4_096) * 64 * 2_048  # and the scores of attention
    more = sum(products(taught).values()) - sum(products(alone).values())
    assert forward < more < 1.1 * forward


@pytest.mark.parametrize("train", ["assignment", "everything"])
def test_a_step_that_does_not_fit_recomputes_then_takes_fewer_sequences(train):
    one = step(sizes(llama_3_8b()), train=train, micro_batch_size=8)

    def needed(**changes):
        return sum(step_memory(replace(one, **changes)).values()) / USABLE_SHARE + 1

    plain, again = needed(), needed(checkpointing=True)
    assert fit_to_memory(one, plain) == one
    assert fit_to_memory(one, again) == replace(one, checkpointing=True)
    is_offloaded = train == "everything"
    least = replace(one, checkpointing=True, micro_batch_size=1)
    least = replace(least, offload=is_offloaded, sharded=is_offloaded)
    for size in (4, 2, 1):
        changes = {"checkpointing": True, "micro_batch_size": size}
        if needed(**changes) < again:  # else both have the same peak, at the end of the backward
            assert fit_to_memory(one, needed(**changes)) == replace(one, **changes)
            again = needed(**changes)
    assert fit_to_memory(one, 0) == least
