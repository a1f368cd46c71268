"""The model of a step's time: its counts, and its predictions beside measured steps."""

import json
from pathlib import Path

import pytest
import torch
from inspected_models import masked_model, sizes, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from dotmoe.inspection import RunSize
from dotmoe.inspection.step_time import (
    LOGIT_BYTES,
    ON_CPU,
    Accelerator,
    Efficiency,
    Work,
    alignment_work,
    measured_here,
)
from dotmoe.moe.losses import distillation_loss

RECORD = json.loads(
    (Path(__file__).resolve().parents[2] / "results" / "planner_check.json").read_text()
)
PRODUCTS = {"mm", "bmm", "addmm"}
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
}
WITHOUT_DATA = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "_unsafe_view"}
EXPERTS = 16


class MovedBytes(TorchDispatchMode):
    """Bytes of all inputs and outputs of what PyTorch runs, but products, attention and views."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        output = operation(*args, **(kwargs or {}))
        name = operation._schema.name.split("::")[1]
        returned = [r.alias_info for r in operation._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returned)
        # A sum by index into the chunk writes few of its entries.
        if not is_view and name not in PRODUCTS | ATTENTION | WITHOUT_DATA | {"scatter_add_"}:
            for leaf in tree_leaves((args, kwargs, output)):
                if isinstance(leaf, torch.Tensor):
                    stored = leaf.untyped_storage().nbytes()
                    self.total += min(leaf.numel() * leaf.element_size(), stored)
        return output


def moved(model, embedded, *, backward):
    with MovedBytes() as forward:
        output = model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    if not backward:
        return forward.total, 0
    with MovedBytes() as there:
        output.sum().backward()
    return forward.total, there.total


def per_layer(dtype, tokens, *, masked, **changes):
    """Forward and backward of one layer: what a second one adds."""
    found = []
    for layers in (1, 2):
        config = tiny(num_hidden_layers=layers, **changes)
        if masked:
            model = masked_model(config, dtype, EXPERTS)
        else:
            model = AutoModelForCausalLM.from_config(config).to(dtype).requires_grad_(False)
        embedded = torch.randn(1, tokens, config.hidden_size, dtype=dtype, requires_grad=masked)
        found.append(moved(model.eval(), embedded, backward=masked))
    return [two - one for one, two in zip(*found, strict=True)]


def works(config, *, dtype, tokens, checkpointing=False):
    found = sizes(config, held=dtype.itemsize, experts=EXPERTS)
    run = RunSize(steps=1, batch_size=1, micro_batch_size=1, seq_len=tokens, device="cpu")
    return alignment_work(found, run, checkpointing=checkpointing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"hidden_size": 128}, {"intermediate_size": 768}])
def test_the_bytes_that_a_layer_moves_are_those_of_the_operations_that_run(dtype, changes):
    work = works(tiny(num_hidden_layers=1, **changes), dtype=dtype, tokens=256)
    teacher, _ = per_layer(dtype, 256, masked=False, **changes)
    student, backward = per_layer(dtype, 256, masked=True, **changes)
    assert work["teacher forward"].moved == pytest.approx(teacher, rel=0.05)
    assert work["student forward"].moved == pytest.approx(student, rel=0.15)
    assert work["backward"].moved == pytest.approx(backward, rel=0.15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_the_losses_are_those_of_the_operations_that_run(dtype):
    student = torch.randn(64, 32, dtype=dtype, requires_grad=True)
    teacher, head = torch.randn(64, 32, dtype=dtype), torch.randn(2_048, 32, dtype=dtype)
    labels = torch.randint(0, 2_048, (64,))
    with MovedBytes() as found:
        distillation_loss(student, teacher, head, labels, kl_weight=2.0, ce_weight=1.0)
    assert LOGIT_BYTES[dtype.itemsize] * 64 * 2_048 == pytest.approx(found.total, rel=0.03)


def test_the_products_of_a_step_are_those_that_pytorch_counts():
    config = tiny()
    work = works(config, dtype=torch.float32, tokens=64)
    dense = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    dense.requires_grad_(False)
    masked = masked_model(config, torch.float32, EXPERTS)
    masked.set_attn_implementation("eager")
    scores = 2 * 2 * 64 * 4 * 32 * config.num_hidden_layers * 64  # eager: the whole square
    embedded = torch.randn(1, 64, 64, requires_grad=True)
    with FlopCounterMode(display=False) as teacher, torch.no_grad():
        dense.model(inputs_embeds=embedded, use_cache=False)
    with FlopCounterMode(display=False) as student:
        output = masked.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    near = {"rel": 0.01}  # norms are counted as products: a few hundred parameters
    assert work["teacher forward"].products == pytest.approx(
        teacher.get_total_flops() - scores, **near
    )
    assert work["student forward"].products == pytest.approx(
        student.get_total_flops() - scores, **near
    )
    assert work["backward"].products == pytest.approx(
        backward.get_total_flops() - 2 * scores, **near
    )
    # Causal attention needs half of the square.
    assert work["teacher forward"].attention == scores // 2


def test_checkpointing_adds_one_forward_of_the_student():
    plain, again = (
        works(tiny(), dtype=torch.float32, tokens=64, checkpointing=flag) for flag in (False, True)
    )
    forward = plain["student forward"]
    for kind in ("products", "attention", "moved"):
        added = getattr(again["backward"], kind) - getattr(plain["backward"], kind)
        assert added == getattr(forward, kind)


def test_seconds_add_up_over_kinds_of_work():
    speed = Accelerator(
        name="some",
        flops_per_s=100.0,
        bytes_per_s=10.0,
        efficiency=Efficiency(products=0.5, attention=0.25, moved=0.2, logits=0.1, origin="said"),
    )
    work = Work(products=100, attention=50, moved=4, logits=3)
    assert speed.seconds(work) == pytest.approx(2 + 2 + 2 + 3)


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
def test_measured_steps_are_predicted_within_25_percent(row):
    assert predicted(row) == pytest.approx(row["seconds"]["step"], rel=0.25)
    # The file is of this model of a step: python benchmarks/planner_check.py --predict-only
    assert sum(row["predicted_s"].values()) == pytest.approx(predicted(row), rel=1e-6)


def test_the_rate_of_this_machine_is_measured():
    rates = measured_here(torch.device("cpu"), torch.float32, seconds=0.01)
    assert (rates.name, rates.dtype, rates.origin) == ("this CPU", "float32", "measured")
    assert 1e8 < rates.flops_per_s < 1e14
    assert 1e8 < rates.bytes_per_s < 1e13
