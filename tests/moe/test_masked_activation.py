"""SiLU or GELU of the gate * up under the mask. Oracle: the equations written out."""

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from dotmoe.method.masked import masked_activation
from dotmoe.models.traits import ACTIVATIONS, GELU, SILU

SHAPE = T, N, E = 7, 12, 4
FORMULAS = {
    SILU: lambda x: x * torch.sigmoid(x),
    GELU: lambda x: x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
}
each = pytest.mark.parametrize("activation", FORMULAS, ids=lambda each: each.name)


def inputs(dtype=torch.float64, shape=SHAPE, *, scale=1.0, device="cpu"):
    """Gate, up, mask, assignment, plan and the output's gradient; mask and plan are not 16-bit."""
    (tokens, neurons, experts), generator = shape, torch.Generator().manual_seed(0)
    activations = torch.randn(3, tokens, neurons, generator=generator, dtype=torch.float64)
    gate, up, grad = (scale * activations).to(dtype)
    routing = torch.rand(tokens, experts, generator=generator) < 0.5
    order = torch.randperm(neurons, generator=generator)
    assignment = torch.arange(experts).repeat_interleave(neurons // experts)[order]
    plan = torch.rand(neurons, experts, generator=generator, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    tensors = (gate, up, routing.to(wide), assignment, plan.to(wide), grad)
    return [tensor.to(device) for tensor in tensors]


def written_out(gate, up, routing, assignment, plan, activation=SILU):
    """eq:moe_output with eq:assignment_ste: a T x N x E product, differentiated by autograd."""
    hard = F.one_hot(assignment, E).to(routing.dtype)
    straight_through = hard + plan - plan.detach()
    return FORMULAS[activation](gate) * up * torch.einsum("te,ne->tn", routing, straight_through)


def gradients(function, gate, up, routing, assignment, plan, weights, activation=SILU):
    leaves = [t.clone().requires_grad_() for t in (gate, up, routing, plan)]
    out = function(leaves[0], leaves[1], leaves[2], assignment, leaves[3], activation)
    (out * weights).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def in_float64(tensors):
    return [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]


@each
@pytest.mark.parametrize("scale", [0.0, 1.0, 300.0])
def test_output_and_gradients_are_those_of_the_written_out_straight_through_estimator(
    scale, activation
):
    found = gradients(masked_activation, *inputs(scale=scale), activation)
    expected = gradients(written_out, *inputs(scale=scale), activation)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_output_is_bit_equal_to_the_operations_one_by_one(dtype, name):
    gate, up, routing, assignment, plan, _ = inputs(dtype)
    expected = ACT2FN[name](gate) * up * routing.to(dtype)[:, assignment]
    found = masked_activation(gate, up, routing, assignment, plan, ACTIVATIONS[name])
    assert torch.equal(found, expected)


def test_bfloat16_activations_keep_their_dtype_and_float32_routing_its_gradient():
    gate, up, routing, *_, weights = tensors = inputs(torch.bfloat16)
    found = gradients(masked_activation, *tensors)
    assert [t.dtype for t in found] == [torch.bfloat16] * 3 + [torch.float32] * 2
    expected = gradients(written_out, *in_float64(tensors))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one.double(), other, rtol=0.03, atol=0.03)
    # The plan's gradient is a float32 sum of what a product of 16-bit tensors rounds to.
    entries = (F.silu(gate) * up * weights).double()
    sums = entries.T @ routing.double()
    torch.testing.assert_close(found[-1].double(), sums, rtol=1e-5, atol=1e-5)


def test_only_gate_up_and_routing_are_kept_for_the_backward():
    gate, up, routing, assignment, plan, _ = inputs()
    gate.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        masked_activation(gate, up, routing, assignment, plan.requires_grad_())
    assert sorted(tuple(t.shape) for t in kept) == sorted([(T, N), (T, N), (T, E), (N,)])
