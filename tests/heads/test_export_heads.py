"""The executable form of experts made of heads. Oracles: the masked dense model, the dense one."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    dynamic_module_utils,
)

from export.comparison import (
    masked_logits,
    require_rounded_as_masked,
    step_by_step,
    stock_logits,
)
from heads.families import FAMILIES, HEADS
from runs import in_turn, on_ranks

pytestmark = pytest.mark.usefixtures("_no_gradients")
CLOSE = {"rtol": 1e-4, "atol": 2e-4}


@pytest.fixture
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def exported(exported, dense_of):
    """Writes experts of heads: the dense model, the layout, the written model and its record."""

    def make(family="llama", layout=None, *, size=1, active=2, dtype="float32", **changes):
        dense = dense_of(family, dtype=dtype, **FAMILIES[family] | changes)
        stored = getattr(torch, dtype)
        split = HEADS | {"num_experts": 4 // size, "active_experts": active, "dtype": stored}
        made = exported(dense, layout or split, out=f"out{active}", verify_tokens=192)
        made.model = AutoModelForCausalLM.from_pretrained(made.folder, dtype=stored).eval()
        assert type(made.model).__name__ == "DotMoeForCausalLM"
        return made

    return make


@pytest.mark.parametrize(("family", "experts"), in_turn(FAMILIES, ((1, 2), (2, 1), (1, 4))))
def test_sparse_is_masked_with_and_without_a_cache(family, experts, exported, tokens_BT):
    size, active = experts
    made, rows = exported(family, size=size, active=active), tokens_BT[:2, :24]
    assert made.record.verification["layers"][0]["misrouted"] == 0
    assert made.record.verification["logits_error"] < 1e-5
    logits, expected = made.model(rows).logits, masked_logits(made.dense, made.layout, rows)
    torch.testing.assert_close(logits, expected, **CLOSE)
    if active * size == 4:
        torch.testing.assert_close(logits, made.dense.model(rows).logits, **CLOSE)
    torch.testing.assert_close(step_by_step(made.model, rows), expected, **CLOSE)


@pytest.mark.parametrize("family", ["llama", "qwen2", "olmo2"])
def test_rows_of_unequal_lengths_say_what_each_says_alone(family, exported, tokens_BT):
    made, short, long = exported(family), tokens_BT[0, :7], tokens_BT[1, :15]
    padded = torch.stack([torch.cat([torch.ones(8, dtype=torch.long), short]), long])
    mask = torch.tensor([[0] * 8 + [1] * 7, [1] * 15])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    together = made.model.generate(padded, attention_mask=mask, **options)[:, 15:]
    for row, prompt in zip(together, (short, long), strict=True):
        text = prompt
        for _ in range(6):
            nearest = masked_logits(made.dense, made.layout, text[None])[0, -1].argmax()
            text = torch.cat([text, nearest[None]])
        assert row.tolist() == text[len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_in_bfloat16_it_rounds_as_the_masked_model_does(family, exported, dense_of, tokens_BT):
    made = exported(family, dtype="bfloat16")
    half = dense_of(family, dtype="bfloat16", load_dtype="bfloat16", **FAMILIES[family])
    require_rounded_as_masked(made.model, made.dense, half, made.layout, tokens_BT)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_both_targets_and_leading_dense_layers(family, exported, dense_of, layout_of, tokens_BT):
    dense = dense_of(family, num_hidden_layers=3, **FAMILIES[family])
    both = tuple(layout_of(dense, dense_layers=1, **split) for split in ({}, HEADS))
    made = exported(family, both, num_hidden_layers=3)
    layers = made.record.verification["layers"]
    assert {layer.get("target", "ffn") for layer in layers} == {"ffn", "attention"}
    expected = masked_logits(made.dense, made.layout, tokens_BT)
    torch.testing.assert_close(made.model(tokens_BT).logits, expected, rtol=1e-4, atol=5e-4)
    names = {name for name, _ in made.model.named_parameters()}
    assert {"model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.experts.down_proj"} <= names
    assert not made.record.active_experts_editable


def test_the_loss_of_one_of_several_batches_is_divided_by_the_tokens_of_all(exported, tokens_BT):
    model, tokens = exported().model, tokens_BT[:1]
    whole, part = (model(tokens, labels=tokens, num_items_in_batch=n).loss for n in (None, 4 * 95))
    torch.testing.assert_close(part, whole / 4)
    torch.testing.assert_close(model(tokens, labels=tokens, return_dict=False)[0], whole)


def run_by_its_own_code(folder, cache, tokens_BT, expected):
    """Where dotmoe cannot be imported, and has not registered its classes."""
    sys.modules |= {name: None for name in sys.modules if name.split(".")[0] == "dotmoe"}
    for registered in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        registered._extra_content.clear()
    dynamic_module_utils.HF_MODULES_CACHE = str(cache)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules.")
    torch.testing.assert_close(model(tokens_BT).logits, expected)


def test_it_runs_by_the_code_in_its_folder(exported, tokens_BT, tmp_path):
    made = exported()
    expected = made.model(tokens_BT).logits
    on_ranks(1, run_by_its_own_code, made.folder, tmp_path / "code", tokens_BT, expected)  # a fork


@pytest.mark.slow
def test_it_runs_by_the_import_on_its_card(exported):
    made = exported()
    (registers,) = set(re.findall("`(import .*?)`", (made.folder / "README.md").read_text()))
    said = (
        f"import sys, torch; {registers}; from transformers import AutoModelForCausalLM as A;"
        "m = A.from_pretrained(sys.argv[1], trust_remote_code=False);"
        "print(m(torch.arange(2, 12)[None]).logits.double().sum().item())"
    )
    place = {"PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, "-c", said, str(made.folder)]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ | place, check=False)
    assert done.returncode == 0, done.stderr
    expected = float(made.model(torch.arange(2, 12)[None]).logits.double().sum())
    assert float(done.stdout) == pytest.approx(expected, abs=1e-3)


def test_idle_heads_are_not_multiplied(exported):
    """FLOPs of the projections, counted by PyTorch, fall with k; K and V are computed in full."""
    router = 2 * 10 * 64 * 4
    for active in (1, 2, 4):
        queries = exported(active=active, head_dim=16).model.model.layers[0].self_attn.q_proj
        with FlopCounterMode(display=False) as counter:
            queries(torch.randn(1, 10, 64))
        assert counter.get_total_flops() - router == 2 * 10 * 64 * 16 * active


def test_the_record_counts_the_heads_that_run_and_names_servers_that_cannot(exported, tokens_BT):
    made = exported(attention_bias=False, head_dim=16)
    record, config = made.record, json.loads((made.folder / "config.json").read_text())
    assert "SGLang and llama.cpp have no such decoder" in record.notes[0]
    assert config["auto_map"]["AutoConfig"] == "modeling_dotmoe.DotMoeConfig"
    idle = 2 * 2 * 64 * 16 * 2  # layers, idle heads, W_Q and W_O
    assert record.parameters["dense"] - record.parameters["active"] == idle
    assert record.parameters["active"] - record.active_at(1)[1] == idle // 2
    assert record.active_at(4)[1] == record.parameters["dense"]
    assert "a learned router runs 2 per token" in (made.folder / "README.md").read_text()
    all_on = {record.active_experts_key: 4}
    whole, expected = (
        stock_logits(made.folder, tokens_BT, **all_on),
        made.dense.model(tokens_BT).logits,
    )
    torch.testing.assert_close(whole, expected, **CLOSE)
