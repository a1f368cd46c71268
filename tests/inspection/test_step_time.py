"""The model of a step's time: its counts, and its predictions beside measured steps."""

import json
from pathlib import Path

import pytest
import torch
from inspected_models import HERE, masked_model, sizes, step, tiny
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from dotmoe.measure.inspection.accelerators import ON_CPU, Accelerator, measured_here
from dotmoe.measure.inspection.operations import Operations, total
from dotmoe.measure.inspection.planner import bytes_moved, products, seconds
from dotmoe.method import sparse
from dotmoe.method.config import RepairConfig
from dotmoe.method.repair import SOLUTIONS, repair
from dotmoe.models.sampling import Sampling, continuations
from dotmoe.run.config import RunConfig
from dotmoe.text.blocks import TokenBlocks
from dotmoe.text.expected import Writing

RECORD = json.loads(
    (Path(__file__).resolve().parents[2] / "results" / "planner_check.json").read_text()
)
EXPERTS = 16


def one_sequence(config, **changes):
    found, one = sizes(config, experts=EXPERTS), {"batch_size": 1, "micro_batch_size": 1}
    return step(found, **one, seq_len=64, weight_bytes=4, on_cpu=True, **changes)


def test_the_products_of_a_step_are_those_that_pytorch_counts():
    config = tiny()
    dense = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    dense.requires_grad_(False)
    masked = masked_model(config, torch.float32, EXPERTS)
    masked.set_attn_implementation("eager")  # computes the whole square
    embedded = torch.randn(1, 64, 64, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        with torch.no_grad():
            dense.model(inputs_embeds=embedded, use_cache=False)
        output = masked.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    found = products(one_sequence(config))
    # Norms and the teacher's routers are counted as products: a few hundred parameters.
    assert found["forward"] == pytest.approx(forward.get_total_flops(), rel=0.02)
    assert found["backward"] == pytest.approx(backward.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("epochs", [0, 2])
def test_the_products_of_a_repair_are_those_that_pytorch_counts(
    epochs, dense_of, layout_of, tmp_path, monkeypatch
):
    monkeypatch.setattr(sparse, "runs_grouped", lambda *given: False)  # it counts no grouped ones
    dense = dense_of("llama", num_hidden_layers=3, hidden_size=64, intermediate_size=384)
    dense.model.set_attn_implementation("eager")  # computes the whole square
    layout = layout_of(dense, 6, active_experts=2)
    blocks = TokenBlocks(torch.arange(64 * 64).reshape(64, 64).int() % 100)
    repairing = RepairConfig(repair_tokens=64 * 64, repair_epochs=epochs)
    with FlopCounterMode(display=False) as counter:
        record = repair(dense, (layout,), blocks, repairing, seed=0, folder=tmp_path)
    assert [layer["ridge"] is None for layer in record["layers"]] == [epochs > 0] * 3
    found = sizes(dense.config, experts=6, active_experts=2)
    width = 384
    solutions = 3 * SOLUTIONS * width**2 * (width // 3 + 2 * 64) * (epochs == 0)  # not counted
    config = RunConfig(model="", out="", repair=True, repairing=repairing)
    work = total(Operations(found, config, 64, HERE).repair(64 * 64))
    assert sum(work[:3]) - solutions == pytest.approx(counter.get_total_flops(), rel=0.05)


def test_the_products_of_writing_are_those_that_pytorch_counts(dense_of):
    dense = dense_of("llama", num_hidden_layers=3, hidden_size=64, intermediate_size=384)
    dense.model.set_attn_implementation("eager")
    kind = Writing(what="texts", texts=6, read=16, written=40, longest=40, rows=3)
    how = Sampling(new_tokens=kind.longest, rows=kind.rows)
    with FlopCounterMode(display=False) as counter:
        made = list(continuations(dense.model, [[5] * kind.read] * kind.texts, how, ends=()))
    assert sum(len(each.ids) for each in made) == kind.tokens
    found = sizes(dense.config, experts=6, active_experts=2)
    config = RunConfig(model="", out="")
    asked, written = Operations(found, config, 64, HERE).answers([kind])
    # The first token of each text is drawn from what was asked.
    counted = asked.work.held + written.work.held * (kind.written - 1) / kind.written
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.03)
    assert written.work.layers == 3 * kind.batches * kind.longest


def test_checkpointing_adds_one_forward_of_the_student():
    plain, again = (one_sequence(tiny(), checkpointing=flag) for flag in (False, True))
    for kind in (products, lambda step: bytes_moved(step, ON_CPU)):
        assert kind(again)["backward"] - kind(plain)["backward"] == kind(plain)["forward"] // 2


@pytest.mark.parametrize(
    "row", RECORD["rows"], ids=lambda row: f"{row['name']}-{row['checkpointing']}"
)
def test_measured_steps_are_predicted_within_15_percent(row):
    subject, shape = row["subject"], row["subject"]["shape"]
    config = LlamaConfig(
        hidden_size=shape["width"],
        intermediate_size=shape["ffn_width"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        vocab_size=shape["vocabulary"],
        max_position_embeddings=shape.get("context", 4_096),
        tie_word_embeddings=False,
    )
    one = step(
        sizes(config, experts=subject["experts"], active_experts=subject["active"]),
        batch_size=subject["micro_batch"] * subject["micro_batches"],
        seq_len=subject["seq_len"],
        micro_batch_size=subject["micro_batch"],
        weight_bytes=4,
        on_cpu=True,
        checkpointing=row["checkpointing"],
    )
    rates = {"flops_per_s": row["matmul_flops_per_s"], "bytes_per_s": row["copy_bytes_per_s"]}
    predicted = sum(seconds(one, Accelerator(name="some", **rates, on_cpu=True)).values())
    assert predicted == pytest.approx(row["seconds"]["step"], rel=0.15)


def test_the_rate_of_this_machine_is_measured():
    rates = measured_here(torch.device("cpu"), torch.float32, seconds=0.01)
    assert (rates.name, rates.dtype, rates.origin) == ("this CPU", "float32", "measured")
    assert 1e8 < rates.flops_per_s < 1e14
    assert 1e8 < rates.bytes_per_s < 1e13
