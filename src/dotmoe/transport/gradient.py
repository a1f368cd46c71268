"""The E x E system behind Newton's step, and the gradient of a plan that it gives."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from dotmoe.transport.plan import row_blocks

REFINEMENTS = 4
"""Solutions with the matrix from near the plan before that of the plan itself is formed."""


def factored(plan_NE: Float[Tensor, "N E"]) -> Float[Tensor, "E E"]:
    """Cholesky factor of the negative Hessian of the semi-dual, diag(M^T 1) - M^T M, in float64.

    Rows of the plan sum to 1, so this is the Laplacian of the graph whose edge e-f weighs
    (M^T M)_ef: its diagonal is taken as the sum of the edges. Subtracting M^T M from diag(M^T 1)
    instead cancels every digit once the plan is nearly 0/1.

    Its kernel, the constants, is pinned. Scaled by column sums, it is damped by the rounding error
    of the plan; where it is still not positive definite, by 100 times as much, until it is.
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
    factors: Sequence[Float[Tensor, "E E"] | None],
) -> Float[Tensor, "L N E"]:
    """The solved plan, as a differentiable function of the affinities it was solved for.

    Differentiating softmax rows and column constraints of eq:entropic_ot at the solution M, with
    G = dL/dM, r = (M*G) 1 and c = (M*G)^T 1 (products entry for entry):

        (diag(M^T 1) - M^T M) b = c - M^T r,    a = r - M b
        dL/dA = (M*G - M*(a 1^T + 1 b^T)) / tau

    The plan is detached, its rows sum to 1. `factors` has for each layer `factored` of a plan near
    M, which saves forming it again, or None.

    Gradient:
        First derivatives, exact up to the marginal error of the plan. Finite for every plan:
        directions in which it is saturated beyond the rounding of its dtype are damped, and their
        share of the gradient is below that rounding.
    """
    attached: Tensor = _ImplicitPlan.apply(  # type: ignore[no-untyped-call]
        affinity_LNE, plan_LNE, tau, factors
    )
    return attached


class _ImplicitPlan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, affinity_LNE: Tensor, plan_LNE: Tensor, tau: float, factors: Sequence[Any]
    ) -> Tensor:
        ctx.tau, ctx.factors = tau, factors
        output_LNE = plan_LNE.detach()
        ctx.save_for_backward(output_LNE)
        return output_LNE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (plan_LNE,) = ctx.saved_tensors
        flow_LNE = torch.empty_like(plan_LNE)
        layers = zip(flow_LNE, plan_LNE, grad_outputs[0], ctx.factors, strict=True)
        for flow, plan, grad, factor in layers:
            _write_gradient(flow, plan, grad, ctx.tau, factor)
        return flow_LNE, None, None, None


def _write_gradient(
    flow_NE: Tensor, plan_NE: Tensor, grad_NE: Tensor, tau: float, factor_EE: Tensor | None
) -> None:
    """dL/dA of one layer, into `flow_NE`."""
    net_E = torch.zeros(plan_NE.shape[1], dtype=torch.float64, device=plan_NE.device)
    for rows in row_blocks(plan_NE):
        plan, grad, flow = plan_NE[rows], grad_NE[rows], flow_NE[rows]
        # M*(G - r) in one go: c - M^T r is the small difference of two large sums.
        torch.sub(grad, (plan * grad).sum(dim=-1, keepdim=True), out=flow)
        flow *= 1.0 / tau
        flow *= plan
        net_E += flow.sum(dim=0)
    small = 64 * torch.finfo(plan_NE.dtype).eps * float(net_E.abs().max())
    for _ in range(REFINEMENTS):
        if factor_EE is None:
            break
        left_E = _balanced_columns(flow_NE, plan_NE, solved(factor_EE, net_E))
        before, after = float(net_E.abs().max()), float(left_E.abs().max())
        if after <= small:
            return
        net_E = left_E
        if after >= 0.1 * before:
            break
    _balanced_columns(flow_NE, plan_NE, solved(factored(plan_NE), net_E))


def _balanced_columns(flow_NE: Tensor, plan_NE: Tensor, potential_E: Tensor) -> Tensor:
    """Subtract M*(1 b^T - (M b) 1^T) from a flow, in place; what its columns still sum to."""
    left_E = torch.zeros_like(potential_E)
    potential = potential_E.to(plan_NE.dtype)
    with torch.autocast(device_type=plan_NE.device.type, enabled=False):
        for rows in row_blocks(plan_NE):
            plan, flow = plan_NE[rows], flow_NE[rows]
            flow.addcmul_(plan, potential - (plan @ potential).unsqueeze(-1), value=-1.0)
            left_E += flow.sum(dim=0)
    return left_E
