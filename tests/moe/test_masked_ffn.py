"""The mask as a gather. Oracle: the equations with every product written out in full."""

import torch

from dotmoe.moe.masked_ffn import mask_neurons

T, N, E = 7, 12, 4


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, N, generator=generator, dtype=torch.float64)
    routing = (torch.rand(T, E, generator=generator) < 0.5).double()
    assignment = torch.arange(E).repeat_interleave(N // E)[torch.randperm(N, generator=generator)]
    plan = torch.rand(N, E, generator=generator, dtype=torch.float64)
    weights = torch.randn(T, N, generator=generator, dtype=torch.float64)
    return hidden, routing, assignment, plan, weights


def test_forward_is_the_product_of_routing_and_assignment():
    hidden, routing, assignment, plan, _ = inputs()
    hard = torch.nn.functional.one_hot(assignment, E).double()
    assert torch.equal(mask_neurons(hidden, routing, assignment, plan), hidden * (routing @ hard.T))


def test_gradients_are_those_of_the_written_out_straight_through_estimator():
    hidden, routing, assignment, plan, weights = inputs()
    leaves = [t.clone().requires_grad_() for t in (hidden, routing, plan)]
    (mask_neurons(leaves[0], leaves[1], assignment, leaves[2]) * weights).sum().backward()

    plain = [t.clone().requires_grad_() for t in (hidden, routing, plan)]
    hard = torch.nn.functional.one_hot(assignment, E).double()
    straight_through = hard + (plan_ste := plain[2]) - plan_ste.detach()
    mask = torch.einsum("te,ne->tn", plain[1], straight_through)
    (plain[0] * mask * weights).sum().backward()
    for found, expected in zip(leaves, plain, strict=True):
        assert torch.allclose(found.grad, expected.grad, atol=1e-12)


def test_without_a_plan_the_assignment_gets_no_gradient():
    hidden, routing, assignment, _, weights = inputs()
    routing.requires_grad_()
    (mask_neurons(hidden, routing, assignment) * weights).sum().backward()
    hard = torch.nn.functional.one_hot(assignment, E).double()
    assert torch.allclose(routing.grad, (weights * hidden) @ hard, atol=1e-12)


def test_bfloat16_activations_keep_their_dtype_and_float32_routing_its_gradient():
    hidden, routing, assignment, plan, weights = inputs()
    routing = routing.float().requires_grad_()
    plan = plan.float().requires_grad_()
    out = mask_neurons(hidden.bfloat16().requires_grad_(), routing, assignment, plan)
    (out * weights.bfloat16()).sum().backward()
    assert out.dtype == torch.bfloat16
    assert routing.grad.dtype == plan.grad.dtype == torch.float32
