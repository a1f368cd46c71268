"""The E x E system behind both Newton's step and the implicit gradient."""

import torch
from jaxtyping import Float
from torch import Tensor


def plan_laplacian(plan_LNE: Float[Tensor, "L N E"]) -> Float[Tensor, "L E E"]:
    """Negative Hessian of the semi-dual, diag(M^T 1) - M^T M, in float64.

    Rows of M sum to 1, so this is the Laplacian of the graph whose edge e-f weighs
    (M^T M)_ef: its diagonal is taken as the sum of the edges. Subtracting M^T M from diag(M^T 1)
    instead cancels every digit once the plan is nearly 0/1.

    Args:
        plan_LNE: Plan with rows summing to 1.

    Returns:
        Symmetric, positive semi-definite, with the constants in its kernel; each entry correct to
        the relative precision of the plan's dtype.
    """
    # Autocast would run this product in bfloat16: three digits, and Newton never arrives.
    with torch.autocast(device_type=plan_LNE.device.type, enabled=False):
        edges_LEE = (plan_LNE.mT @ plan_LNE).double()
    edges_LEE.diagonal(dim1=-2, dim2=-1).zero_()
    return torch.diag_embed(edges_LEE.sum(dim=-1)) - edges_LEE


def solve_laplacian(
    laplacian_LEE: Float[Tensor, "L E E"],
    weight_LE: Float[Tensor, "L E"],
    right_LE: Float[Tensor, "L E"],
    *,
    damping: float,
) -> Float[Tensor, "L E"]:
    """Solve (Laplacian + damping * diag(weight)) x = right, orthogonal to the constants.

    Scaled symmetrically by weight^-1/2, with the constant direction pinned to 1, then Cholesky. A
    matrix that is still not positive definite in float64 gets 100 times the damping, until it is.

    Args:
        laplacian_LEE: From `plan_laplacian`; its diagonal is at most `weight_LE` near a solution.
        weight_LE: Positive scale of each expert: its column sum, or the capacity.
        right_LE: Right-hand sides; only what sums to zero can be answered.
        damping: Relative damping above 0; of the order of the plan's rounding error.

    Returns:
        The solution with mean zero. Finite whenever the arguments are.
    """
    scale_LE = weight_LE.rsqrt()
    matrix_LEE = laplacian_LEE * scale_LE.unsqueeze(-1) * scale_LE.unsqueeze(-2)
    pin_LE = torch.nn.functional.normalize(weight_LE.sqrt(), dim=-1)
    matrix_LEE += pin_LE.unsqueeze(-1) * pin_LE.unsqueeze(-2)
    damping_L = torch.full_like(weight_LE[..., 0], damping)
    # The matrix has eigenvalues in [0, 2]: eight steps of 100 dominate any rounding.
    for _ in range(8):
        damped_LEE = matrix_LEE + torch.diag_embed(damping_L.unsqueeze(-1).expand_as(weight_LE))
        factor_LEE, failed_L = torch.linalg.cholesky_ex(damped_LEE)
        if not bool(failed_L.any()):
            break
        damping_L = torch.where(failed_L > 0, damping_L * 100.0, damping_L)
    right_LE = (right_LE - right_LE.mean(dim=-1, keepdim=True)) * scale_LE
    solved_LE = torch.cholesky_solve(right_LE.unsqueeze(-1), factor_LEE).squeeze(-1) * scale_LE
    return solved_LE - solved_LE.mean(dim=-1, keepdim=True)
