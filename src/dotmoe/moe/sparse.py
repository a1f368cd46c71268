"""The trainable form of an MoE layer: experts as weights of their own, of which only k compute."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dotmoe.distributed import full_tensor
from dotmoe.layout import ExpertLayout
from dotmoe.models.dense import DenseModel
from dotmoe.models.traits import GatedFFN
from dotmoe.moe.router import Routing, router_logits

EXPERT_WEIGHTS = ("gate_ESD", "up_ESD", "down_ESD")
"""Names of the experts' parameters in a `SparseFFN`, which are those of the projections' rows."""

_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GROUPED_BYTES = 16


class Router(nn.Module):
    """Router rows of one layer, always float32. A module, so that FSDP can treat it apart."""

    def __init__(self, rows_ED: Float[Tensor, "E D"]) -> None:
        super().__init__()
        self.weight_ED = nn.Parameter(rows_ED.to(torch.float32, copy=True))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Logits, [T, E] in float32 (eq:router_logits)."""
        return router_logits(x_TD, self.weight_ED)


class SparseFFN(nn.Module):
    """Takes the place of a dense FFN; its weights are parameters in the order of the experts.

    Neuron s of expert e is row [e, s] of the gate, up and down weights, each [E, S, D]. Made of a
    dense FFN on the meta device, only its routers are there.
    """

    def __init__(self, dense: GatedFFN, layout: ExpertLayout, layer: int, routing: Routing) -> None:
        super().__init__()
        weights_on = dense.gate.weight.device
        device = layout.router_LED.device if weights_on.type == "meta" else weights_on
        self.neurons_ES: Tensor
        self.shared_M: Tensor
        self.register_buffer(
            "neurons_ES", layout.neurons_of_expert(layer).to(device), persistent=False
        )
        self.register_buffer("shared_M", layout.shared_neurons(layer).to(device), persistent=False)
        self.routing = routing
        self.router = Router(layout.router_LED[layer].to(device))
        rows = (dense.gate.weight, dense.up.weight, dense.down.weight.T)
        self.gate_ESD, self.up_ESD, self.down_ESD = (
            nn.Parameter(rows_ND.detach()[self.neurons_ES]) for rows_ND in rows
        )
        self.shared: nn.ParameterList | None = None
        """Gate, up and down rows of the shared expert, [M, D] each."""
        if len(self.shared_M):
            self.shared = nn.ParameterList(rows_ND.detach()[self.shared_M] for rows_ND in rows)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]: the k experts of each token, and the shared one if any."""
        x_TD = x.reshape(-1, x.shape[-1])
        experts = (self.gate_ESD, self.up_ESD, self.down_ESD)
        if self.routing.enabled:
            mask_TE, chosen_TK = self.routing.route(self.router(x_TD))
            mean_where_unknown(mask_TE)
            output_TD = expert_sums(x_TD, mask_TE, chosen_TK, *experts)
        else:
            output_TD = _gated(x_TD, *(weight_ESD.flatten(0, 1) for weight_ESD in experts))
        if self.shared is not None:
            output_TD = output_TD + _gated(x_TD, *self.shared)
        return output_TD.view(x.shape)

    def weights(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter | None]]:
        """Name of each projection, its rows of the experts, and of the shared one if any."""
        experts = (self.gate_ESD, self.up_ESD, self.down_ESD)
        shared = [None] * 3 if self.shared is None else list(self.shared)
        return zip(("gate", "up", "down"), experts, shared, strict=True)

    def dense_rows(self) -> dict[str, Tensor]:
        """gate, up and (transposed) down of the dense FFN that this is made of, as it is now.

        Returns:
            [N, D] each, rows in the order of the neurons. Every rank must ask, if the weights are
            divided over ranks.
        """
        return {
            name: self._in_neuron_order(experts, shared) for name, experts, shared in self.weights()
        }

    def _in_neuron_order(self, experts_ESD: Tensor, shared_MD: Tensor | None) -> Tensor:
        experts_ESD = full_tensor(experts_ESD.detach())
        neurons_ES = self.neurons_ES.to(experts_ESD.device)
        num_neurons = neurons_ES.numel() + len(self.shared_M)
        rows_ND = experts_ESD.new_empty(num_neurons, experts_ESD.shape[2])
        rows_ND[neurons_ES.flatten()] = experts_ESD.flatten(0, 1)
        if shared_MD is not None:
            rows_ND[self.shared_M.to(rows_ND.device)] = full_tensor(shared_MD.detach())
        return rows_ND


def make_sparse(dense: DenseModel, layout: ExpertLayout, routing: Routing) -> list[SparseFFN]:
    """Replace every split FFN of `dense.model` by its experts, for good.

    The weights are copied layer by layer, and the dense FFN is let go.

    Returns:
        The new FFNs, in the order of `layout.moe_layers`.
    """
    layers = list(dense.family.layers(dense.model))
    made = []
    for index in layout.moe_layers:
        ffn = SparseFFN(dense.family.ffn(layers[index]), layout, index, routing)
        layers[index].mlp = ffn
        made.append(ffn)
    return made


def mean_where_unknown(mask_TE: Float[Tensor, "T E"]) -> None:
    """From here on the gradient of the mask is set, where it is 0, to the mean over where it is 1.

    The output of an expert that did not run is not known, and so is not its gradient. Nothing in
    its place would raise the logits of whatever was chosen, since running an expert lowers the loss
    more often than not, and routing would collapse. With the mean a chosen one rises or falls by
    how it compares with the other chosen ones.
    """
    if not mask_TE.requires_grad:
        return
    hard_TE = mask_TE.detach()

    def fill(grad_TE: Tensor) -> Tensor:
        known = grad_TE * hard_TE
        mean = known.sum(dim=1, keepdim=True) / hard_TE.sum(dim=1, keepdim=True)
        return known + (1 - hard_TE) * mean

    mask_TE.register_hook(fill)  # type: ignore[no-untyped-call]


def _gated(x_TD: Tensor, gate_ND: Tensor, up_ND: Tensor, down_ND: Tensor) -> Tensor:
    """(SiLU(x W_gate) * (x W_up)) W_down (eq:ffn_intermediate, eq:ffn_output)."""
    return (F.silu(x_TD @ gate_ND.T) * (x_TD @ up_ND.T)) @ down_ND


def expert_sums(
    x_TD: Float[Tensor, "T D"],
    mask_TE: Float[Tensor, "T E"],
    chosen_TK: Int[Tensor, "T K"],
    gate_ESD: Float[Tensor, "E S D"],
    up_ESD: Float[Tensor, "E S D"],
    down_ESD: Float[Tensor, "E S D"],
) -> Float[Tensor, "T D"]:
    """Sum of the chosen experts' outputs, each with weight exactly 1 (eq:moe_output).

    Tokens are sorted by expert, and each expert multiplies its own tokens only: 6 T k S D
    multiplications and additions, whatever E is. No token is dropped.

    Args:
        x_TD: Input of the FFN, in the dtype of the weights.
        mask_TE: Routing mask R; entries 0 and 1, exactly k ones a row.
        chosen_TK: Where they are.
        gate_ESD: Gate rows of each expert's neurons.
        up_ESD: Up rows.
        down_ESD: Down columns, as rows.

    Gradient:
        To x and the weights, what autograd gives the masked dense FFN. To the mask, <g_t, y_te> for
        the chosen experts (eq:router_ste), where y_te is the expert's output, and 0 for others,
        whose output is not computed. Activations kept: x, and gate and up of the chosen experts.
    """
    order_R = chosen_TK.flatten().argsort(stable=True)
    place_R = torch.empty_like(order_R)
    place_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    counts_E = torch.bincount(chosen_TK.flatten(), minlength=mask_TE.shape[1])
    ends_E = counts_E.cumsum(0).to(torch.int32)
    weight_R = mask_TE.gather(1, chosen_TK).flatten()[order_R]
    result: Tensor = _ExpertSums.apply(  # type: ignore[no-untyped-call]
        x_TD, weight_R, order_R // chosen_TK.shape[1], place_R, ends_E, gate_ESD, up_ESD, down_ESD
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


def runs_grouped(dtype: torch.dtype, *widths: int) -> bool:
    """Whether `torch.nn.functional.grouped_mm` takes matrices of that dtype and those widths.

    It wants 16 or 32 bits, and rows whose length is a multiple of 16 bytes. It is one kernel for
    16-bit numbers on GPUs that have grouped GEMM; elsewhere PyTorch itself loops over the groups.
    """
    return dtype in _GROUPED_DTYPES and all(
        w * dtype.itemsize % _GROUPED_BYTES == 0 for w in widths
    )


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
