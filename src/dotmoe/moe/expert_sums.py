"""The chosen experts' outputs, summed: what a token's k experts compute and nothing else."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dotmoe.moe.grouped_products import grouped_outer, grouped_rows


def expert_sums(
    x_TD: Float[Tensor, "T D"],
    mask_TE: Float[Tensor, "T E"],
    active_experts: int,
    gate_ESD: Float[Tensor, "E S D"],
    up_ESD: Float[Tensor, "E S D"],
    down_ESD: Float[Tensor, "E S D"],
) -> Float[Tensor, "T D"]:
    """Sum of the chosen experts' outputs, each with weight exactly 1 (eq:moe_output).

    Tokens are sorted by expert, and each expert multiplies its own tokens only: 6 T k S D
    multiplications and additions, whatever E is. No token is dropped.

    Args:
        x_TD: Input of the FFN, in the dtype of the weights.
        mask_TE: Routing mask R; entries 0 and 1, exactly `active_experts` ones a row.
        active_experts: k.
        gate_ESD: Gate rows of each expert's neurons.
        up_ESD: Up rows.
        down_ESD: Down columns, as rows.

    Gradient:
        To x and the weights, what autograd gives the masked dense FFN. To the mask, <g_t, y_te> for
        the chosen experts (eq:router_ste), where y_te is the expert's output, and 0 for others,
        whose output is not computed. Activations kept: x, and gate and up of the chosen experts.
    """
    expert_TK = mask_TE.detach().topk(active_experts, dim=1).indices
    order_R = expert_TK.flatten().argsort(stable=True)
    place_R = torch.empty_like(order_R)
    place_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    counts_E = torch.bincount(expert_TK.flatten(), minlength=mask_TE.shape[1])
    ends_E = counts_E.cumsum(0).to(torch.int32)
    weight_R = mask_TE.gather(1, expert_TK).flatten()[order_R]
    result: Tensor = _ExpertSums.apply(  # type: ignore[no-untyped-call]
        x_TD, weight_R, order_R // active_experts, place_R, ends_E, gate_ESD, up_ESD, down_ESD
    )
    return result


class _ExpertSums(torch.autograd.Function):
    """R rows, one for each token and each expert that it chose, in the order of the experts."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_R: Tensor,
        token_R: Tensor,
        place_R: Tensor,
        ends_E: Tensor,
        gate_ESD: Tensor,
        up_ESD: Tensor,
        down_ESD: Tensor,
    ) -> Tensor:
        x_RD = x_TD[token_R]
        gate_RS = grouped_rows(x_RD, gate_ESD.transpose(1, 2), ends_E)
        up_RS = grouped_rows(x_RD, up_ESD.transpose(1, 2), ends_E)
        output_RD = grouped_rows(F.silu(gate_RS).mul_(up_RS), down_ESD, ends_E)
        ctx.save_for_backward(
            x_TD, gate_RS, up_RS, token_R, place_R, ends_E, gate_ESD, up_ESD, down_ESD
        )
        ctx.weight_dtype = weight_R.dtype
        return _summed(output_RD, place_R, len(x_TD))

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, gate_RS, up_RS, token_R, place_R, ends_E, gate_ESD, up_ESD, down_ESD = (
            ctx.saved_tensors
        )
        wants_x, wants_weight, *_, wants_gate, wants_up, wants_down = ctx.needs_input_grad
        grad_RD = grad_TD[token_R]
        grad_hidden = grouped_rows(grad_RD, down_ESD.transpose(1, 2), ends_E)
        silu = F.silu(gate_RS)
        hidden = silu * up_RS
        # <g_t, y_te> = <W_down g_t, h_te>: no output of an expert has to be kept.
        dtype = ctx.weight_dtype
        grad_weight = (grad_hidden * hidden).sum(dim=1, dtype=dtype) if wants_weight else None
        grad_down = grouped_outer(hidden, grad_RD, ends_E) if wants_down else None
        grad_up = silu.mul_(grad_hidden)
        grad_gate = torch.ops.aten.silu_backward(grad_hidden.mul_(up_RS), gate_RS)
        grad_x = None
        if wants_x:
            input_RD = grouped_rows(grad_gate, gate_ESD, ends_E)
            input_RD += grouped_rows(grad_up, up_ESD, ends_E)
            grad_x = _summed(input_RD, place_R, len(x_TD))
        x_RD = x_TD[token_R] if wants_gate or wants_up else None
        grads = [
            grouped_outer(grad_rows, x_RD, ends_E) if wants and x_RD is not None else None
            for wants, grad_rows in ((wants_gate, grad_gate), (wants_up, grad_up))
        ]
        return grad_x, grad_weight, None, None, None, *grads, grad_down


def _summed(rows_RD: Tensor, place_R: Tensor, num_tokens: int) -> Tensor:
    """Rows added up by token, always in the same order: the sum has the same bits every time."""
    return rows_RD[place_R].view(num_tokens, -1, rows_RD.shape[1]).sum(dim=1)
