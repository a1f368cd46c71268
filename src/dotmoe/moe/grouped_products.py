"""Matrix products of groups of rows, each with a matrix of its own: grouped GEMM, or a loop."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT_BYTES = 16


def runs_grouped(dtype: torch.dtype, *widths: int) -> bool:
    """Whether `torch.nn.functional.grouped_mm` takes matrices of that dtype and those widths.

    It wants 16 or 32 bits, and rows whose length is a multiple of 16 bytes. It is one kernel for
    16-bit numbers on GPUs that have grouped GEMM; elsewhere PyTorch itself loops over the groups.
    """
    return dtype in _DTYPES and all(w * dtype.itemsize % _ALIGNMENT_BYTES == 0 for w in widths)


def grouped_rows(
    rows_RA: Float[Tensor, "R A"], weight_EAB: Float[Tensor, "E A B"], ends_E: Int[Tensor, " E"]
) -> Float[Tensor, "R B"]:
    """Rows of group e times `weight[e]`, for all groups; no autograd.

    Args:
        rows_RA: Rows in the order of their groups.
        weight_EAB: One matrix a group, contiguous or the transposed view of a contiguous one.
        ends_E: Row after the last of each group, int32, ascending; groups may be empty.
    """
    if runs_grouped(rows_RA.dtype, *weight_EAB.shape[1:]):
        return F.grouped_mm(rows_RA, weight_EAB, offs=ends_E)
    result_RB = rows_RA.new_empty(len(rows_RA), weight_EAB.shape[2])
    for expert, rows in _groups(ends_E):
        torch.mm(rows_RA[rows], weight_EAB[expert], out=result_RB[rows])
    return result_RB


def grouped_outer(
    left_RA: Float[Tensor, "R A"], right_RB: Float[Tensor, "R B"], ends_E: Int[Tensor, " E"]
) -> Float[Tensor, "E A B"]:
    """left^T @ right of each group by itself, zeros for an empty one; no autograd.

    Args:
        left_RA: Rows in the order of their groups, contiguous.
        right_RB: As many rows, contiguous.
        ends_E: As for `grouped_rows`.
    """
    if runs_grouped(left_RA.dtype, left_RA.shape[1], right_RB.shape[1]):
        return F.grouped_mm(left_RA.T, right_RB, offs=ends_E)
    result_EAB = left_RA.new_zeros(len(ends_E), left_RA.shape[1], right_RB.shape[1])
    for expert, rows in _groups(ends_E):
        torch.mm(left_RA[rows].T, right_RB[rows], out=result_EAB[expert])
    return result_EAB


def _groups(ends_E: Tensor) -> list[tuple[int, slice]]:
    """Number and rows of the groups that have any."""
    ends = ends_E.tolist()
    starts = [0, *ends[:-1]]
    return [
        (expert, slice(start, end))
        for expert, (start, end) in enumerate(zip(starts, ends, strict=True))
        if end > start
    ]
