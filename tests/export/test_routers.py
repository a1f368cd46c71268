"""Routers of runtimes, and p. Oracles: stock routers, double precision, vLLM's formula."""

import math
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from dotmoe.export.architectures import FORMATS
from dotmoe.export.format import Gating
from dotmoe.export.routers import (
    route,
    router_exponent,
    routing_problems,
    runtime_routing,
    runtimes_of,
    scale_routers,
)
from dotmoe.method.masked import masked_by

EXPERTS, ACTIVE, WIDTH = 24, 5, 64
STOCK_ROUTERS = ("glm4_moe", "mixtral", "qwen3_moe", "granitemoe", "flex_olmo")


def stock_router(name, rows_ED):
    config = SimpleNamespace(
        hidden_size=WIDTH,
        num_experts_per_tok=ACTIVE,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        norm_topk_prob=name != "glm4_moe",
        routed_scaling_factor=1.0,
        n_group=1,
        topk_group=1,
    )
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    (made,) = (each for key, each in vars(module).items() if key.lower().endswith("topkrouter"))
    router = made(config)
    router.weight = torch.nn.Parameter(rows_ED, requires_grad=False)
    return router


def text_like(num_tokens, dtype, *, num_experts=EXPERTS, std=2.5):
    """Inputs and router rows, both exact in the dtype, with logits of about that spread."""
    x_TD = torch.randn(num_tokens, WIDTH).to(dtype).float()
    router_ED = (torch.randn(num_experts, WIDTH) * std / WIDTH**0.5).to(dtype).float()
    return x_TD, router_ED


def routing(name, x_TD, router_ED, exponent, dtype, active_experts=ACTIVE):
    gating = FORMATS[name].gating
    rows = runtime_routing(x_TD, router_ED, exponent, active_experts, gating, dtype)
    return {row["runtime"].split(",")[0]: row for row in rows}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STOCK_ROUTERS)
def test_choices_and_weights_are_those_of_the_stock_router(name, dtype):
    x_TD, router_ED = text_like(300, dtype)
    rows_ED = (router_ED * 2.0**-12).to(dtype)
    _, weights, chosen = stock_router(name, rows_ED)(x_TD.to(dtype))
    gating = FORMATS[name].gating
    in_model_dtype = torch.nn.functional.linear(x_TD.to(dtype), rows_ED).float()
    scaled = in_model_dtype if name != "glm4_moe" else x_TD @ rows_ED.float().T
    ours, our_weights = route(runtimes_of(gating)[0], scaled, ACTIVE, gating, dtype)
    order, our_order = chosen.argsort(dim=1), ours.argsort(dim=1)
    assert torch.equal(chosen.gather(1, order), ours.gather(1, our_order))
    actual, expected = our_weights.gather(1, our_order), weights.float().gather(1, order)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", STOCK_ROUTERS)
def test_gates_are_those_of_double_precision(name):
    x_TD, router_ED = text_like(400, torch.float32)
    scaled = x_TD.double() @ router_ED.double().T * 2.0**-6
    top = scaled.topk(ACTIVE, dim=1)
    if name == "glm4_moe":
        gates = 2 / (1 + torch.exp(-top.values))
    else:
        gates = ACTIVE * torch.softmax(top.values, dim=1)
    gain = float((gates - 1).median())
    deviation = (gates - 1).abs().amax(dim=1)
    expected = max(0.0, float(deviation.quantile(0.95)) - abs(gain))
    for row in routing(name, x_TD, router_ED, 6, torch.float32).values():
        assert row["gain_error"] == pytest.approx(gain, rel=1e-3, abs=1e-6)
        assert row["gate_deviation"] == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(("experts", "active", "percent"), [(48, 12, 0.20), (112, 28, -0.20)])
def test_vllm_on_a_cpu_rounds_gates_to_bfloat16(experts, active, percent):
    # Measured in vLLM 0.32: k 12 +0.20 %; the other by its formula.
    x_TD, router_ED = text_like(200, torch.bfloat16, num_experts=experts)
    rows = routing("mixtral", x_TD, router_ED, 16, torch.bfloat16, active)
    assert 100 * rows["vLLM on a CPU"]["gain_error"] == pytest.approx(percent, abs=0.006)
    assert rows["SGLang"]["gain_error"] == pytest.approx(0, abs=1e-4)
    rows = routing("mixtral", x_TD, router_ED, 16, torch.float32, active)
    assert abs(rows["vLLM on a CPU"]["gain_error"]) < 1e-4


def test_a_p_too_large_shows_where_scores_are_ranked_and_only_there():
    x_TD, router_ED = text_like(2000, torch.float32, num_experts=112)
    rows = routing("mixtral", x_TD, router_ED, 16, torch.float32, 22)
    # Measured before for float32 logits of std 2.5: 0.021.
    assert 0.01 < rows["Transformers"]["misrouted"] < 0.04
    assert rows["SGLang"]["misrouted"] == rows["vLLM on a CPU"]["misrouted"] == 0
    x_TD, router_ED = text_like(1000, torch.float32)
    rows = routing("granitemoe", x_TD, router_ED, 40, torch.float32)
    assert rows["Transformers"]["misrouted"] == 0
    assert rows["vLLM on CUDA"]["misrouted"] > 0.5
    for row in routing("glm4_moe", x_TD, router_ED, 20, torch.float32).values():
        assert row["misrouted"] > 0.1
        assert row["gate_deviation"] < 2**-16


def test_a_p_too_large_for_float16_shows_on_metal_alone():
    x_TD, router_ED = text_like(1000, torch.float32)
    gating = Gating(score="softmax_of_chosen", only_in="llama.cpp")
    for exponent, is_right in ((router_exponent(x_TD @ router_ED.T), True), (40, False)):
        found = runtime_routing(x_TD, router_ED, exponent, ACTIVE, gating, torch.float32)
        rows = {row["runtime"]: row for row in found}
        assert rows["llama.cpp"]["misrouted"] == 0
        misrouted = rows["llama.cpp on Metal and Vulkan"]["misrouted"]
        assert misrouted < 0.01 if is_right else misrouted > 0.9


@pytest.mark.parametrize(
    ("std", "expected"), [(2.5, {12}), (1.0, {10, 11}), (0.25, {8, 9}), (1e-9, {-16}), (0, {0})]
)
def test_the_exponent_follows_the_published_rule(std, expected):
    assert router_exponent(torch.randn(4096, 32) * std) in expected


def test_scales_look_at_the_masked_models_own_router_inputs(dense, layout_of, tokens_BT):
    layout = layout_of(dense)
    seen = []
    with torch.no_grad(), masked_by(dense, layout):
        norm = dense.family.layers(dense.model)[1].post_attention_layernorm
        norm.register_forward_hook(lambda module, arguments, output: seen.append(output))
        dense.model(input_ids=tokens_BT)
    expected = (seen[0].flatten(0, 1) @ layout.router_LED[1].T).std(correction=0)
    scale = scale_routers(dense, layout, tokens_BT, FORMATS["glm4_moe"].gating, torch.float32)[1]
    assert scale["layer"] == 1
    assert abs(math.log2(expected) - scale["exponent"] + 10.7) <= 0.5


def scale_with(layer, **figures):
    row = {"runtime": "SGLang", "misrouted": 0.0, "gate_deviation": 0.0, "gain_error": 0.0}
    return {"layer": layer, "runtimes": [row, row | {"runtime": "vLLM"} | figures]}


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"misrouted": 0.0502}, "share of misrouted tokens is 0.0502, limit 0.05"),
        ({"gate_deviation": 0.016}, "deviation of a gate from 1 is 0.016, limit 0.0156"),
        ({"gain_error": -0.04}, "common factor of the gates, less 1, is 0.04, limit 0.0312"),
        ({"misrouted": math.nan}, "misrouted tokens is nan"),
    ],
)
def test_a_figure_beyond_its_limit_is_named_with_layer_and_runtime(figures, words):
    at_limits = scale_with(3, misrouted=0.05, gate_deviation=2**-6, gain_error=2**-5)
    (problem,) = routing_problems([at_limits, scale_with(4, **figures)], 10**9)
    assert problem.startswith("layer 4 in vLLM: ")
    assert words in problem


def test_a_small_sample_has_four_standard_errors():
    # 100 tokens: 0.05 + 4 sqrt(0.05 / 100) = 0.1394.
    assert routing_problems([scale_with(4, misrouted=0.139)], 100) == []
    assert len(routing_problems([scale_with(4, misrouted=0.14)], 100)) == 1
