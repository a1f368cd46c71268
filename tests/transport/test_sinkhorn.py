import numpy as np
import torch

from dotmoe.method.transport import plan, sinkhorn
from runs import affinity


def test_few_sweeps_equal_plain_scaling_of_rows_and_columns():
    # alg:sinkhorn in the probability domain, written out: v starts at log(s).
    A = affinity(12, 3)
    kernel = np.exp(A.numpy() / 0.5)
    v = np.full(3, 4.0)
    for _ in range(3):
        u = 1.0 / (kernel @ v)
        v = 4.0 / (kernel.T @ u)
    result = sinkhorn(A, capacity=4, tau=0.5, num_sweeps=3)
    np.testing.assert_allclose(result.entries.numpy(), u[:, None] * kernel * v, rtol=1e-12)
    np.testing.assert_allclose(result.potential.numpy(), np.log(v), rtol=1e-12)
    assert result.num_passes == 6


def test_its_gradient_is_that_of_finite_differences():
    def plan(A):
        return sinkhorn(A, capacity=2, tau=0.5, num_sweeps=7).entries

    assert torch.autograd.gradcheck(plan, affinity(6, 3).requires_grad_())


def test_its_gradient_holds_the_sweeps_of_no_layer():
    held = 0

    def pack(tensor):
        nonlocal held
        held += tensor.numel()
        return tensor

    A = affinity(6, 32, 4).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        sinkhorn(A, capacity=8, tau=0.5)
    # Unrolled, 50 sweeps hold some 200 plans.
    assert held <= 2 * A.numel()


def test_layers_that_are_solved_together_have_the_bits_of_each_alone(monkeypatch):
    A, weight = affinity(5, 40, 6).float().requires_grad_(), affinity(5, 40, 6, seed=1).float()
    found = []
    for at_once in (5, 2, 1):
        monkeypatch.setattr(plan, "CACHED_ELEMENTS", at_once * 40 * 6)
        assert plan.layers_at_once(A, num_sweeps=50) == at_once
        result = sinkhorn(A, capacity=[4, 4, 4, 4, 4, 20], tau=0.1)
        (gradient,) = torch.autograd.grad((result.entries * weight).sum(), A)
        found.append((result.entries, result.potential, gradient))
    for parts in found[1:]:
        for one, other in zip(found[0], parts, strict=True):
            assert torch.equal(one, other)


def test_layers_are_solved_as_if_alone():
    A = affinity(2, 3, 12, 4)
    together = sinkhorn(A, capacity=3, tau=0.3)
    assert together.marginal_error.shape == (2, 3)
    assert together.num_passes == 2 * 50  # tab:hyperparams_moefication
    torch.testing.assert_close(
        together.entries[1, 2], sinkhorn(A[1, 2], capacity=3, tau=0.3).entries
    )
