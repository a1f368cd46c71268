import math

import pytest
import torch

from dotmoe.errors import UserError
from dotmoe.export.gating import Gating
from dotmoe.export.router_scale import router_exponent, router_scale, router_scales, scaled_router
from dotmoe.moe.surgery import masked_by

SIGMOID = Gating(score="sigmoid", renormalised=False, constant=2.0)


def softmax(num_experts):
    return Gating(score="softmax", renormalised=False, constant=float(num_experts))


def scale_of(logits, active_experts, gating=SIGMOID):
    """The scale of a router that gives just these logits: its rows are those of the identity."""
    return router_scale(logits, torch.eye(logits.shape[1]), active_experts, gating, torch.float32)


@pytest.mark.parametrize(
    ("std", "expected"), [(2.5, {12}), (1.0, {10, 11}), (0.25, {8, 9}), (1e-9, {-16})]
)
def test_the_exponent_follows_the_published_rule(std, expected):
    logits = torch.randn(4096, 32) * std
    assert router_exponent(logits) in expected
    assert scale_of(logits, 8).exponent in expected


@pytest.mark.parametrize("gating", [SIGMOID, softmax(48)], ids=["sigmoid", "softmax"])
@pytest.mark.parametrize("std", [0.01, 0.3, 1.0, 2.5, 40.0, 1e4])
def test_the_scaled_spread_is_near_its_target_at_every_scale(std, gating):
    logits = torch.randn(2048, 48) * std
    scale = scale_of(logits, 12, gating)
    assert abs(math.log2(scale.logit_std) - scale.exponent + 10.7) <= 0.5
    assert scale.gate_deviation < 2**-7
    assert scale.misrouted < 0.006


def test_the_figures_of_a_layer_are_those_of_its_weakest_runtime():
    scale = scale_of(torch.randn(500, 24), 6, softmax(24))
    assert scale.misrouted == max(row.misrouted for row in scale.runtimes)
    assert scale.gate_deviation == max(row.gate_deviation for row in scale.runtimes)


@pytest.mark.parametrize(
    ("gating", "slope"), [(SIGMOID, 0.5), (softmax(32), 1.0)], ids=["sigmoid", "softmax"]
)
def test_the_expected_gate_deviation_is_the_spread_of_all_gates(gating, slope):
    logits = torch.randn(4096, 32)
    scale = scale_of(logits, 8, gating)
    scaled = logits.double() * 2.0**-scale.exponent
    gates = 2 * scaled.sigmoid() if slope == 0.5 else 32 * scaled.softmax(dim=1)
    assert scale.expected_gate_deviation == pytest.approx(float(gates.std()), rel=0.03)


@pytest.mark.parametrize(
    ("experts", "active", "softmax_first", "noisy_softmax", "sigmoid_first"),
    [(148, 37, 0.0009, 0.003, 0.004), (112, 22, 0.001, 0.003, 0.003)],
)
def test_misrouting_at_the_papers_sizes_agrees_with_what_was_measured_before(
    experts, active, softmax_first, noisy_softmax, sigmoid_first
):
    # float32 logits of standard deviation 2.5, at p = 12; within the spread of 20 to 80 tokens.
    logits = torch.randn(20_000, experts) * 2.5
    by_softmax = scale_of(logits, active, softmax(experts))
    by_sigmoid = scale_of(logits, active)
    assert by_softmax.exponent == by_sigmoid.exponent == 12
    rows = {row.runtime: row.misrouted for row in by_softmax.runtimes}
    pairs = [
        (rows["Transformers"], softmax_first),
        (rows["vLLM on CUDA"], noisy_softmax),
        (by_sigmoid.misrouted, sigmoid_first),
        # What the rule expects in the weakest runtime, from the distances of the logits alone.
        (by_softmax.expected_misrouted, noisy_softmax),
        (by_sigmoid.expected_misrouted, sigmoid_first),
    ]
    assert all(0.5 < ours / theirs < 2 for ours, theirs in pairs), pairs


def test_equal_logits_need_no_scale_and_misroute_nothing():
    scale = scale_of(torch.zeros(8, 4), 2)
    assert (scale.exponent, scale.misrouted, scale.expected_misrouted) == (0, 0.0, 0.0)


def test_all_experts_on_misroutes_nothing():
    scale = scale_of(torch.randn(8, 4), 4)
    assert (scale.misrouted, scale.expected_misrouted) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exponent", [-16, 0, 11, 48])
def test_scaling_is_exact(dtype, exponent):
    router = (torch.randn(8, 16) * 0.02).to(dtype).float()
    scaled = scaled_router(router, exponent, dtype, layer=0)
    assert scaled.dtype == dtype
    assert torch.equal(torch.ldexp(scaled.float(), torch.tensor(exponent)), router)


def test_an_inexact_entry_is_named():
    with pytest.raises(UserError, match=r"0\.1000000.* of layer 7 times 2\^-11 .*bfloat16"):
        scaled_router(torch.full((2, 2), 0.1), 11, torch.bfloat16, layer=7)


def test_scales_look_at_the_masked_models_own_router_inputs(dense_of, layout_of, tokens_BT):
    dense = dense_of("llama")
    layout = layout_of(dense)
    seen = []
    with torch.no_grad(), masked_by(dense, layout):
        norm = dense.family.layers(dense.model)[1].post_attention_layernorm
        norm.register_forward_hook(lambda module, arguments, output: seen.append(output))
        dense.model(input_ids=tokens_BT)
    expected = (seen[0].flatten(0, 1) @ layout.router_LED[1].T).std(correction=0)
    scale = router_scales(dense, layout, tokens_BT, SIGMOID, torch.float32)[1]
    assert scale.logit_std == pytest.approx(float(expected), rel=1e-5)
