"""The E x E system behind both Newton's step and the implicit gradient."""

from dataclasses import dataclass

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
        upper_LEE = _upper_gram(plan_LNE).double().triu_(diagonal=1)
    edges_LEE = upper_LEE + upper_LEE.mT
    return torch.diag_embed(edges_LEE.sum(dim=-1)) - edges_LEE


def _upper_gram(plan_LNE: Tensor) -> Tensor:
    """M^T M on and above the diagonal: four products with five eighths of the work of one."""
    num_experts = plan_LNE.shape[-1]
    gram_LEE = plan_LNE.new_zeros(len(plan_LNE), num_experts, num_experts)
    width = -(-num_experts // 4)
    for first in range(0, num_experts, width):
        last = min(first + width, num_experts)
        strip = plan_LNE[..., first:last].mT @ plan_LNE[..., first:]
        gram_LEE[:, first:last, first:] = strip
    return gram_LEE


@dataclass(frozen=True, kw_only=True, slots=True)
class FactoredLaplacian:
    """A Laplacian that right-hand sides can be solved for."""

    factor_LEE: Float[Tensor, "L E E"]
    """Cholesky factor of the scaled matrix."""
    scale_LE: Float[Tensor, "L E"]

    def solve(self, right_LE: Float[Tensor, "L E"]) -> Float[Tensor, "L E"]:
        """Solve (Laplacian + damping * diag(weight)) x = right, orthogonal to the constants.

        Args:
            right_LE: Right-hand sides; only what sums to zero can be answered.

        Returns:
            The solution with mean zero. Finite whenever the arguments are.
        """
        right_LE = (right_LE - right_LE.mean(dim=-1, keepdim=True)) * self.scale_LE
        solved_LE1 = torch.cholesky_solve(right_LE.unsqueeze(-1), self.factor_LEE)
        solved_LE = solved_LE1.squeeze(-1) * self.scale_LE
        return solved_LE - solved_LE.mean(dim=-1, keepdim=True)


def factor_laplacian(
    laplacian_LEE: Float[Tensor, "L E E"], weight_LE: Float[Tensor, "L E"], *, damping: float
) -> FactoredLaplacian:
    """Factor Laplacian + damping * diag(weight), with the constant direction pinned to 1.

    Scaled symmetrically by weight^-1/2, then Cholesky. A matrix that is still not positive definite
    in float64 gets 100 times the damping, until it is.

    Args:
        laplacian_LEE: From `plan_laplacian`; its diagonal is at most `weight_LE` near a solution.
        weight_LE: Positive scale of each expert: its column sum, or the capacity.
        damping: Relative damping above 0; of the order of the plan's rounding error.
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
    return FactoredLaplacian(factor_LEE=factor_LEE, scale_LE=scale_LE)
