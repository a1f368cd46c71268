"""Format dotmoe with experts of neurons alone. Oracles: the masked dense model, the dense one."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoModelForCausalLM

from dotmoe.common.errors import UserError
from dotmoe.export.config import ExportConfig
from dotmoe.export.write import require_exportable
from dotmoe.method.granularity import Granularity
from dotmoe.method.masked import masked_by
from dotmoe.models.family import FAMILIES
from export.comparison import (
    logits_of,
    masked_logits,
    require_rounded_as_masked,
    step_by_step,
    stock_logits,
)
from models.test_members import HYBRID, MEMBERS
from runs import in_turn

OWN = {name: MEMBERS[name][0] for name, family in FAMILIES.items() if family.has_own_decoder}
OWN["granitemoehybrid"] = HYBRID
"""Families whose decoder no stock MoE has: rope, windows and norms differ by layer."""
SPLITS = ({}, {"shared_size": 24, "dense_layers": 1, "num_experts": 9})


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(("family", "split"), in_turn(OWN, SPLITS))
def test_it_computes_the_masked_model_with_and_without_a_cache(
    family, split, dense_of, exported, tokens_BT
):
    dense, rows = dense_of(family, **OWN[family]), tokens_BT[:2, :40]
    made = exported(dense, split, format="dotmoe")
    assert (made.record.format, made.record.problems) == ("dotmoe", [])
    assert "SGLang and llama.cpp have no such decoder" in made.record.notes[0]
    model = AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float32).eval()
    expected = masked_logits(dense, made.layout, rows)
    close(logits_of(model, rows), expected)
    close(step_by_step(model, rows), expected)
    all_on = {made.record.active_experts_key: made.layout.num_experts}
    close(stock_logits(made.folder, rows, **all_on), logits_of(dense.model, rows))


@pytest.mark.parametrize("family", ["gemma3_text", "lfm2"])
def test_the_decoder_without_its_head_is_the_masked_one(family, dense_of, exported, tokens_BT):
    made = exported(dense_of(family, **OWN[family]), SPLITS[1], format="dotmoe")
    decoder = AutoModel.from_pretrained(made.folder, dtype=torch.float32).eval()
    with masked_by(made.dense, made.layout), torch.no_grad():
        expected = made.dense.model.model(tokens_BT).last_hidden_state
        close(decoder(tokens_BT).last_hidden_state, expected)


@pytest.mark.parametrize("family", ["smollm3", "gemma3_text"])
def test_in_bfloat16_it_rounds_as_the_masked_model_does(family, dense_of, exported, tokens_BT):
    dense = dense_of(family, dtype="bfloat16", **OWN[family])
    half = dense_of(family, dtype="bfloat16", load_dtype="bfloat16", **OWN[family])
    made = exported(dense, {"dtype": torch.bfloat16})
    model = AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.bfloat16).eval()
    require_rounded_as_masked(model, dense, half, made.layout, tokens_BT)


def test_what_it_costs_is_said_before(command, tiny_dense, dense_of, caplog):
    model = tiny_dense("smollm3", **OWN["smollm3"])
    assert "SGLang and llama.cpp cannot load" in " ".join(command("inspect", model).out.split())
    split = Granularity(num_experts=12, expert_size=8, active_experts=3)
    require_exportable(dense_of("smollm3", **OWN["smollm3"]), (split,), ExportConfig())
    assert "SGLang and llama.cpp cannot load" in caplog.text


def test_only_the_chosen_experts_are_multiplied(dense_of, exported):
    made = exported(dense_of("smollm3", **OWN["smollm3"]), {"active_experts": 3})
    model = AutoModelForCausalLM.from_pretrained(made.folder, experts_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model.layers[0].mlp(torch.randn(1, 10, 64))
    assert counter.get_total_flops() == 2 * 10 * (64 * 12 + 3 * 3 * 64 * 8)


def test_it_holds_stock_families_if_asked_and_other_formats_say_why_not(
    dense_of, exported, tokens_BT
):
    made = exported("llama", {"shared_size": 24, "num_experts": 9}, format="dotmoe")
    close(stock_logits(made.folder, tokens_BT), masked_logits(made.dense, made.layout, tokens_BT))
    dense = dense_of("olmo3", **OWN["olmo3"])
    split = Granularity(num_experts=12, expert_size=8, active_experts=3)
    with pytest.raises(UserError, match=r"decoder of olmo3.*can hold it: dotmoe"):
        require_exportable(dense, (split,), ExportConfig(format="glm4_moe"))
    heads = replace(split, num_experts=4, expert_size=1, target="attention")
    with pytest.raises(UserError, match="Set targets to ffn"):
        require_exportable(dense, (heads,), ExportConfig(format="dotmoe"))
