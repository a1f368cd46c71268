import math

import pytest
import torch

from dotmoe.errors import UserError
from dotmoe.export.router_scale import router_scale, router_scales, scaled_router, shortfall
from dotmoe.moe.surgery import masked_by


@pytest.mark.parametrize(
    ("std", "expected"), [(2.5, {12}), (1.0, {10, 11}), (0.25, {8, 9}), (1e-9, {-16})]
)
def test_the_exponent_follows_the_published_rule(std, expected):
    logits = torch.randn(4096, 32) * std
    assert router_scale(logits, 8).exponent in expected


@pytest.mark.parametrize("std", [0.01, 0.3, 1.0, 2.5, 40.0, 1e4])
def test_the_scaled_spread_is_near_its_target_at_every_scale(std):
    logits = torch.randn(2048, 48) * std
    scale = router_scale(logits, 12)
    assert abs(math.log2(scale.logit_std) - scale.exponent + 10.7) <= 0.5
    assert scale.gate_deviation < 2**-8
    assert scale.misrouted_softmax_first < 0.005
    assert scale.misrouted_sigmoid_first < 0.005


def test_gate_deviation_is_that_of_double_precision_sigmoids():
    logits = torch.randn(256, 24)
    scale = router_scale(logits, 6)
    exact = (2 / (1 + torch.exp(-logits.double() * 2.0**-scale.exponent)) - 1).abs().max()
    assert scale.gate_deviation == pytest.approx(float(exact), rel=1e-3)


@pytest.mark.slow
def test_misrouting_at_the_papers_size_agrees_with_the_reference_measurement():
    # E = 148, k = 37, float32 logits of std 2.5 at p = 12: 0.0009 softmax-first, 0.004 sigmoid.
    logits = torch.randn(20_000, 148) * 2.5
    scale = router_scale(logits, 37)
    assert scale.exponent == 12
    assert 0.0003 < scale.misrouted_softmax_first < 0.003
    assert 0.002 < scale.misrouted_sigmoid_first < 0.007


def test_equal_logits_need_no_scale_and_misroute_nothing():
    scale = router_scale(torch.zeros(8, 4), 2)
    assert (scale.exponent, scale.misrouted_sigmoid_first) == (0, 0.0)


def test_shortfall_ignores_ties_and_measures_mistakes():
    logits = torch.tensor([[1.0, 1.0, 0.0], [3.0, 2.0, 2.5], [5.0, 1.0, 0.0]])
    chosen = torch.tensor([[1], [1], [0]])
    assert shortfall(logits, chosen).tolist() == [0.0, 1.0, -4.0]
    assert shortfall(logits, torch.tensor([[0, 1, 2]] * 3)).max() == -math.inf


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
    scale = router_scales(dense, layout, tokens_BT)[1]
    assert scale.logit_std == pytest.approx(float(expected), rel=1e-5)
