"""The model of a step's time: its counts, and its predictions beside measured steps."""

import json
from pathlib import Path

import pytest
import torch
from inspected_models import masked_model, sizes, tiny
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from dotmoe.inspection import RunSize
from dotmoe.inspection.step_time import (
    ON_CPU,
    Accelerator,
    alignment_work,
    measured_here,
)

RECORD = json.loads(
    (Path(__file__).resolve().parents[2] / "results" / "planner_check.json").read_text()
)
EXPERTS = 16


def works(config, *, dtype, tokens, checkpointing=False):
    found = sizes(config, held=dtype.itemsize, experts=EXPERTS)
    run = RunSize(steps=1, batch_size=1, micro_batch_size=1, seq_len=tokens, device="cpu")
    return alignment_work(found, run, checkpointing=checkpointing)


def test_the_products_of_a_step_are_those_that_pytorch_counts():
    config = tiny()
    work = works(config, dtype=torch.float32, tokens=64)
    dense = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    dense.requires_grad_(False)
    masked = masked_model(config, torch.float32, EXPERTS)
    masked.set_attn_implementation("eager")  # computes the whole square
    embedded = torch.randn(1, 64, 64, requires_grad=True)
    counted = {}
    with FlopCounterMode(display=False) as counted["teacher forward"], torch.no_grad():
        dense.model(inputs_embeds=embedded, use_cache=False)
    with FlopCounterMode(display=False) as counted["student forward"]:
        output = masked.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    with FlopCounterMode(display=False) as counted["backward"]:
        output.sum().backward()
    for part, counter in counted.items():
        # Norms are counted as products: a few hundred parameters.
        assert work[part].products == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_checkpointing_adds_one_forward_of_the_student():
    plain, again = (
        works(tiny(), dtype=torch.float32, tokens=64, checkpointing=flag) for flag in (False, True)
    )
    forward = plain["student forward"]
    for kind in ("products", "moved"):
        added = getattr(again["backward"], kind) - getattr(plain["backward"], kind)
        assert added == getattr(forward, kind)


def predicted(row):
    subject = row["subject"]
    shape = subject["shape"]
    found = sizes(
        LlamaConfig(
            hidden_size=shape["width"],
            intermediate_size=shape["ffn_width"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["kv_heads"],
            vocab_size=shape["vocabulary"],
            max_position_embeddings=shape.get("context", 4_096),
            tie_word_embeddings=False,
        ),
        held=4,
        experts=subject["experts"],
        active_experts=subject["active"],
    )
    run = RunSize(
        steps=1,
        batch_size=subject["micro_batch"] * subject["micro_batches"],
        seq_len=subject["seq_len"],
        micro_batch_size=subject["micro_batch"],
        device="cpu",
    )
    speed = Accelerator(
        name="some",
        flops_per_s=row["matmul_flops_per_s"],
        bytes_per_s=row["copy_bytes_per_s"],
        efficiency=ON_CPU,
    )
    parts = alignment_work(found, run, checkpointing=row["checkpointing"])
    return sum(map(speed.seconds, parts.values()))


@pytest.mark.parametrize(
    "row", RECORD["rows"], ids=lambda row: f"{row['name']}-{row['checkpointing']}"
)
def test_measured_steps_are_predicted_within_15_percent(row):
    assert predicted(row) == pytest.approx(row["seconds"]["step"], rel=0.15)
    # The file is of this model of a step: python benchmarks/planner_check.py --predict-only
    assert sum(row["predicted_s"].values()) == pytest.approx(predicted(row), rel=1e-6)


def test_the_rate_of_this_machine_is_measured():
    rates = measured_here(torch.device("cpu"), torch.float32, seconds=0.01)
    assert (rates.name, rates.dtype, rates.origin) == ("this CPU", "float32", "measured")
    assert 1e8 < rates.flops_per_s < 1e14
    assert 1e8 < rates.bytes_per_s < 1e13
