"""The executable form of experts made of heads. Oracles: the masked dense model, the dense one."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from dotmoe.bench import weights_of
from dotmoe.export import ExportConfig, export
from dotmoe.export.record import set_active_experts
from dotmoe.moe.masked import masked_by
from heads.families import FAMILIES, head_layout

CONFIG = ExportConfig(verify_tokens=192)


def exported(dense, layout, out, text, dtype=torch.float32):
    """The written model and its record."""
    record = export(dense, layout, out, CONFIG, text)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=dtype)
    assert type(model).__name__ == "DotMoeForCausalLM"
    return model.eval(), record


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("size", "active"), [(1, 2), (2, 1), (1, 4)])
def test_sparse_is_masked_with_and_without_a_cache(
    family, size, active, dense_of, tokens_BT, tmp_path
):
    dense = dense_of(family, **FAMILIES[family])
    layout = head_layout(dense, active_experts=active, size=size)
    model, record = exported(dense, layout, tmp_path / "out", tokens_BT)
    assert record.verification["layers"][0]["misrouted"] == 0
    assert record.verification["logits_error"] < 1e-5
    rows = tokens_BT[:2, :24]
    with torch.no_grad():
        logits = model(rows).logits
        with masked_by(dense, layout):
            expected = dense.model(rows).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-4)
        if active * size == 4:
            torch.testing.assert_close(logits, dense.model(rows).logits, rtol=1e-4, atol=2e-4)
        first = model(rows[:, :9], use_cache=True)
        found, cache = [first.logits], first.past_key_values
        for place in range(9, 24):
            found.append(model(rows[:, place : place + 1], past_key_values=cache).logits)
        torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "olmo2"])
def test_rows_of_unequal_lengths_say_what_each_says_alone(family, dense_of, tokens_BT, tmp_path):
    dense = dense_of(family, **FAMILIES[family])
    layout = head_layout(dense, active_experts=2)
    model, _ = exported(dense, layout, tmp_path / "out", tokens_BT)
    short, long = tokens_BT[0, :7], tokens_BT[1, :15]
    padded = torch.stack([torch.cat([torch.ones(8, dtype=torch.long), short]), long])
    mask = torch.tensor([[0] * 8 + [1] * 7, [1] * 15])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    together = model.generate(padded, attention_mask=mask, **options)[:, 15:]
    with masked_by(dense, layout):
        for row, prompt in zip(together, (short, long), strict=True):
            text = prompt
            for _ in range(6):
                with torch.no_grad():
                    nearest = dense.model(text[None]).logits[0, -1].argmax()
                text = torch.cat([text, nearest[None]])
            assert row.tolist() == text[len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_in_bfloat16_it_differs_from_masked_as_little_as_that_from_float32(
    family, dense_of, tokens_BT, tmp_path
):
    """A token whose experts tie in 16 bits may be sent elsewhere; medians do not mind."""
    dense = dense_of(family, dtype="bfloat16", **FAMILIES[family])
    layout = head_layout(dense, active_experts=2)
    layout = replace(layout, router_LED=layout.router_LED.bfloat16().float())
    model, _ = exported(dense, layout, tmp_path / "out", tokens_BT, torch.bfloat16)
    half = dense_of(family, dtype="bfloat16", load_dtype="bfloat16", **FAMILIES[family])
    with torch.no_grad():
        found = model(tokens_BT).logits.float()
        with masked_by(dense, layout):
            exact = dense.model(tokens_BT).logits
        with masked_by(half, layout):
            masked = half.model(tokens_BT).logits.float()

    def median(error):
        return float(error.abs().mean(dim=2).median())

    assert median(found - masked) < 1.5 * median(masked - exact)
    assert median(found - exact) < 1.5 * median(masked - exact)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_both_targets_and_leading_dense_layers(family, dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of(family, num_hidden_layers=3, **FAMILIES[family])
    heads = head_layout(dense, active_experts=2)
    heads.expert_of_neuron_LN[0] = -1
    both = replace(layout_of(dense, dense_layers=1), beside=heads)
    model, record = exported(dense, both, tmp_path / "out", tokens_BT)
    targets = {layer.get("target", "ffn") for layer in record.verification["layers"]}
    assert targets == {"ffn", "attention"}
    with torch.no_grad(), masked_by(dense, both):
        expected = dense.model(tokens_BT).logits
    with torch.no_grad():
        torch.testing.assert_close(model(tokens_BT).logits, expected, rtol=1e-4, atol=5e-4)
    names = {name for name, _ in model.named_parameters()}
    assert "model.layers.0.mlp.down_proj.weight" in names
    assert "model.layers.1.mlp.experts.down_proj" in names


def test_a_model_without_dotmoe_runs_the_code_in_the_folder(dense_of, tokens_BT, tmp_path):
    dense = dense_of("llama")
    model, _ = exported(dense, head_layout(dense, active_experts=2), tmp_path / "out", tokens_BT)
    said = (
        "import sys, torch; from transformers import AutoModelForCausalLM as A;"
        "m = A.from_pretrained(sys.argv[1], trust_remote_code=True);"
        "assert not any(n.split('.')[0] == 'dotmoe' for n in sys.modules);"
        "print(m(torch.arange(2, 12)[None]).logits.double().sum().item())"
    )
    place = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""}
    line = [sys.executable, "-c", said, str(tmp_path / "out")]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ | place, check=False)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = float(model(torch.arange(2, 12)[None]).logits.double().sum())
    assert float(done.stdout) == pytest.approx(expected, abs=1e-3)


def test_idle_heads_are_not_multiplied(dense_of, tokens_BT, tmp_path):
    """FLOPs of the projections, counted by PyTorch, fall with k; K and V are computed in full."""
    from torch.utils.flop_counter import FlopCounterMode

    dense = dense_of("llama")
    counted = {}
    for active in (1, 2, 4):
        layout = head_layout(dense, active_experts=active)
        model, _ = exported(dense, layout, tmp_path / str(active), tokens_BT)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.model.layers[0].self_attn.q_proj(torch.randn(1, 10, 64))
        counted[active] = counter.get_total_flops()
    router = 2 * 10 * 64 * 4
    assert {k: flops - router for k, flops in counted.items()} == {
        k: 2 * 10 * 64 * 16 * k for k in (1, 2, 4)
    }


def test_servers_that_cannot_run_it_and_its_own_code_are_named(dense_of, tokens_BT, tmp_path):
    dense = dense_of("llama")
    _, record = exported(dense, head_layout(dense, active_experts=2), tmp_path / "o", tokens_BT)
    assert "vLLM, SGLang and llama.cpp" in record.notes[0]
    config = json.loads((tmp_path / "o/config.json").read_text())
    assert config["auto_map"]["AutoConfig"] == "modeling_dotmoe.DotMoeConfig"


def test_the_work_of_a_token_is_counted_with_the_heads_that_run(dense_of, tokens_BT, tmp_path):
    dense = dense_of("llama")
    model, record = exported(dense, head_layout(dense, active_experts=2), tmp_path / "o", tokens_BT)
    tensors = {name: (p.nbytes, tuple(p.shape)) for name, p in model.named_parameters()}
    weights = weights_of(tensors, 2)
    idle = 2 * 2 * 64 * 16 * 2  # layers, idle heads, W_Q and W_O
    assert 2 * weights["expert"]["products"] == idle
    assert record.parameters["dense"] - record.parameters["active"] == idle
    half = record.with_active_experts(1)
    assert record.parameters["active"] - half.parameters["active"] == idle // 2
    changed = set_active_experts(tmp_path / "o", 4)
    assert changed.parameters["active"] == record.parameters["dense"]
    assert "a learned router runs 4 per token" in (tmp_path / "o/README.md").read_text()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "o", dtype=torch.float32)
    with torch.no_grad():
        expected = dense.model(tokens_BT).logits
        torch.testing.assert_close(whole(tokens_BT).logits, expected, rtol=1e-4, atol=2e-4)
