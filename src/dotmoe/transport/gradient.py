"""The E x E system behind Newton's step, and the gradient of a plan that it gives."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


def factored(plan_NE: Float[Tensor, "N E"]) -> Float[Tensor, "E E"]:
    """Cholesky factor of the negative Hessian of the semi-dual, diag(M^T 1) - M^T M, in float64.

    Rows of M sum to 1, so this is the Laplacian of the graph whose edge e-f weighs
    (M^T M)_ef: its diagonal is taken as the sum of the edges. Subtracting M^T M from diag(M^T 1)
    instead cancels every digit once the plan is nearly 0/1.

    Args:
        plan_NE: Plan with rows summing to 1.

    Returns:
        Factor of the Laplacian with its kernel, the constants, pinned. Scaled by column sums, it is
        damped by the rounding error of the plan; where it is still not positive definite in
        float64, by 100 times as much, until it is.
    """
    # Autocast would run this product in bfloat16: three digits, and Newton never arrives.
    with torch.autocast(device_type=plan_NE.device.type, enabled=False):
        edges_EE = (plan_NE.mT @ plan_NE).double()
    sums_E = edges_EE.sum(dim=0)
    edges_EE.fill_diagonal_(0.0)
    laplacian_EE = torch.diag(edges_EE.sum(dim=0)) - edges_EE
    root_E = sums_E.clamp_min(1e-3 * sums_E.mean()).sqrt()
    pin_E = torch.nn.functional.normalize(root_E, dim=0)
    matrix_EE = laplacian_EE / root_E / root_E.unsqueeze(-1) + torch.outer(pin_E, pin_E)
    damping = torch.finfo(plan_NE.dtype).eps
    while True:
        damped_EE = matrix_EE + damping * torch.eye(len(root_E), device=root_E.device)
        factor_EE, failed = torch.linalg.cholesky_ex(damped_EE)
        # The matrix has eigenvalues in [0, 2]: a damping of 10 dominates any rounding.
        if not bool(failed) or damping > 10:
            scaled_EE: Tensor = root_E.unsqueeze(-1) * factor_EE
            return scaled_EE
        damping *= 100.0


def solved(factor_EE: Float[Tensor, "E E"], right_E: Float[Tensor, " E"]) -> Float[Tensor, " E"]:
    """Solve Laplacian x = right for the x with mean zero; the mean of `right` is left out."""
    centred_E1 = (right_E - right_E.mean()).unsqueeze(-1)
    solved_E = torch.cholesky_solve(centred_E1, factor_EE).squeeze(-1)
    return solved_E - solved_E.mean()


def attach_gradient(
    affinity_LNE: Float[Tensor, "L N E"],
    plan_LNE: Float[Tensor, "L N E"],
    tau: float,
) -> Float[Tensor, "L N E"]:
    """The solved plan, as a differentiable function of the affinities it was solved for.

    Differentiating softmax rows and column constraints of eq:entropic_ot at the solution M, with
    G = dL/dM, r = (M*G) 1 and c = (M*G)^T 1 (products entry for entry):

        (diag(M^T 1) - M^T M) b = c - M^T r,    a = r - M b
        dL/dA = (M*G - M*(a 1^T + 1 b^T)) / tau

    Args:
        affinity_LNE: Affinities A.
        plan_LNE: Plan M solved for them, detached, rows summing to 1.
        tau: Temperature > 0, in units of affinity.

    Returns:
        `plan_LNE` with a gradient function; first derivatives only.

    Gradient:
        Exact up to the marginal error of the plan. Finite for every plan: directions in which the
        plan is saturated beyond the rounding of its dtype are damped, and their share of the
        gradient is below that rounding.
    """
    attached: Tensor = _ImplicitPlan.apply(affinity_LNE, plan_LNE, tau)  # type: ignore[no-untyped-call]
    return attached


class _ImplicitPlan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, affinity_LNE: Tensor, plan_LNE: Tensor, tau: float) -> Tensor:
        ctx.tau = tau
        ctx.save_for_backward(plan_LNE)
        return plan_LNE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (plan_LNE,) = ctx.saved_tensors
        layers = zip(plan_LNE, grad_outputs[0], strict=True)
        return torch.stack([_gradient(plan, grad) for plan, grad in layers]) / ctx.tau, None, None


def _gradient(plan_NE: Tensor, grad_NE: Tensor) -> Tensor:
    """Gradient to the affinities of one layer, times tau."""
    # M*(G - r) in one go: c - M^T r is the small difference of two large sums.
    flow_NE = plan_NE * (grad_NE - (plan_NE * grad_NE).sum(dim=-1, keepdim=True))
    potential_E = solved(factored(plan_NE), flow_NE.sum(dim=0, dtype=torch.float64))
    potential_E = potential_E.to(plan_NE.dtype)
    with torch.autocast(device_type=plan_NE.device.type, enabled=False):
        return flow_NE.addcmul_(
            plan_NE, potential_E - (plan_NE @ potential_E).unsqueeze(-1), value=-1.0
        )
