"""The trainable form of an MoE layer: experts have weights of their own, and only k compute."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dotmoe.common.sharded import full_tensor
from dotmoe.method.layout import ExpertLayout
from dotmoe.method.masked import masked_activation
from dotmoe.method.router import Routing, is_dense
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.family import GatedFFN
from dotmoe.models.traits import SILU, Activation


class Router(nn.Module):
    """Router rows of one layer, trained in float32; a module so that FSDP need not round them."""

    def __init__(self, rows_ED: Float[Tensor, "E D"], routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.weight_ED = nn.Parameter(rows_ED.to(torch.float32, copy=True))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Logits, [T, E] in float32 (eq:router_logits)."""
        return self.routing.logits(x_TD, self.weight_ED)


class SparseFFN(nn.Module):
    """Replacement of a dense FFN, whose weights are parameters in the order of the experts.

    Neuron s of expert e is row [e, s] of the gate, up and down weights, each [E, S, D]. If the
    dense FFN is on the meta device, so are these weights, and only the router has values.
    """

    def __init__(self, dense: GatedFFN, layout: ExpertLayout, layer: int, routing: Routing) -> None:
        super().__init__()
        weights_of_dense = dense.gate.weight
        weights_on = weights_of_dense.device
        device = layout.router_LED.device if weights_on.type == "meta" else weights_on
        self.neurons_ES = nn.Buffer(layout.neurons_of_expert(layer).to(device), persistent=False)
        self.shared_M = nn.Buffer(layout.shared_neurons(layer).to(device), persistent=False)
        self.num_neurons = weights_of_dense.shape[0]
        """Those of the dense FFN, also the dropped ones, which are in no expert."""
        self.routing = routing
        self.activation = dense.activation
        self.router = Router(layout.router_LED[layer].to(device), routing)
        rows = [w.detach() for w in (dense.gate.weight, dense.up.weight, dense.down.weight.T)]
        self.gate_ESD, self.up_ESD, self.down_ESD = (
            nn.Parameter(rows_ND[self.neurons_ES]) for rows_ND in rows
        )
        self.shared: nn.ParameterList | None = None
        """Gate, up and down rows of the shared expert, [M, D] each."""
        if len(self.shared_M):
            self.shared = nn.ParameterList(rows_ND[self.shared_M] for rows_ND in rows)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D] by the k experts of each token, plus the shared one if any."""
        x_TD = x.reshape(-1, x.shape[-1])
        experts = (self.gate_ESD, self.up_ESD, self.down_ESD)
        if not is_dense():
            mask_TE, chosen_TK = self.routing.route(self.router(x_TD))
            fill_unknown(mask_TE, by_mean=self.routing.mean_if_unchosen)
            output_TD = expert_sums(x_TD, mask_TE, chosen_TK, *experts, self.activation)
        else:
            rows = (weight_ESD.flatten(0, 1) for weight_ESD in experts)
            output_TD = _gated(self.activation, x_TD, *rows)
        if self.shared is not None:
            output_TD = output_TD + _gated(self.activation, x_TD, *self.shared)
        return output_TD.view(x.shape)

    def weights(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter | None]]:
        """Each projection's name, the experts' rows, and the shared expert's rows if any."""
        experts = (self.gate_ESD, self.up_ESD, self.down_ESD)
        shared = (None, None, None) if self.shared is None else tuple(self.shared)
        return zip(("gate", "up", "down"), experts, shared, strict=True)

    def dense_rows(self) -> dict[str, Tensor]:
        """Gate, up and (transposed) down of the dense FFN, [N, D] each; all ranks must call it.

        Dropped neurons, which no layout brings back, are 0.
        """
        place_R = torch.cat([self.neurons_ES.flatten(), self.shared_M])
        weights = {}
        for name, experts, shared in self.weights():
            rows_ND = full_tensor(experts.detach()).flatten(0, 1)
            if shared is not None:
                rows_ND = torch.cat([rows_ND, full_tensor(shared.detach())])
            whole_ND = rows_ND.new_zeros(self.num_neurons, rows_ND.shape[1])
            whole_ND[place_R.to(rows_ND.device)] = rows_ND
            weights[name] = whole_ND
        return weights


def make_sparse(dense: DenseModel, layout: ExpertLayout, routing: Routing) -> list[SparseFFN]:
    """Replace every split FFN of `dense.model` for good; return the new FFNs in layer order."""
    layers = dense.family.layers(dense.model)
    ffns = list[SparseFFN]()
    for index in layout.moe_layers:
        ffns.append(SparseFFN(dense.family.ffn(layers[index]), layout, index, routing))
        setattr(layers[index], dense.family.own_name("mlp"), ffns[-1])
    return ffns


def fill_unknown(mask_TE: Float[Tensor, "T E"], *, by_mean: bool) -> None:
    """Where a token's mask is 0, set its gradient to 0, or to the mean over where the mask is 1.

    The output of an expert that did not run is unknown. With a gradient of 0 (paper), logits of
    chosen experts would rise for ever, because running an expert usually lowers the loss, and
    routing would collapse. With the mean, a logit rises or falls by comparison with the others.
    """
    if not mask_TE.requires_grad:
        return
    hard_TE = mask_TE.detach()

    def fill(grad_TE: Tensor) -> Tensor:
        chosen_TE = grad_TE * hard_TE
        if not by_mean:
            return chosen_TE
        mean_T1 = chosen_TE.sum(dim=1, keepdim=True) / hard_TE.sum(dim=1, keepdim=True)
        return chosen_TE + (1 - hard_TE) * mean_T1

    mask_TE.register_hook(fill)  # type: ignore[no-untyped-call]


def _gated(
    activation: Activation, x_TD: Tensor, gate_ND: Tensor, up_ND: Tensor, down_ND: Tensor
) -> Tensor:
    """(activation(x W_gate) * (x W_up)) W_down (eq:ffn_intermediate, eq:ffn_output)."""
    return (activation.apply(x_TD @ gate_ND.T) * (x_TD @ up_ND.T)) @ down_ND


def expert_sums(
    x_TD: Float[Tensor, "T D"],
    mask_TE: Float[Tensor, "T E"],
    chosen_TK: Int[Tensor, "T K"],
    gate_ESD: Float[Tensor, "E S D"],
    up_ESD: Float[Tensor, "E S D"],
    down_ESD: Float[Tensor, "E S D"],
    activation: Activation = SILU,
) -> Float[Tensor, "T D"]:
    """Sum of the chosen experts' outputs, each with weight exactly 1 (eq:moe_output).

    Tokens are sorted by expert, and each expert multiplies only its own tokens: 6 T k S D
    multiplications and additions for any E, except if `whole_is_faster`. No token is dropped. Each
    row of the mask has exactly k ones, at `chosen_TK`. Columns of W_down are rows of `down_ESD`.

    Gradient:
        x and the weights receive what autograd gives for the masked dense FFN. The mask receives
        <g_t, y_te> for chosen experts (eq:router_ste), where y_te is the expert's output, and 0 for
        others, whose output is not computed. The mask scales W_down's input: no output is kept.
    """
    num_experts, num_chosen = mask_TE.shape[1], chosen_TK.shape[1]
    if whole_is_faster(x_TD.device, x_TD.dtype, num_chosen / num_experts, gate_ESD.shape[1]):
        gate_ND, up_ND, down_ND = (w_ESD.flatten(0, 1) for w_ESD in (gate_ESD, up_ESD, down_ESD))
        expert_N = torch.arange(len(gate_ND), device=x_TD.device) // gate_ESD.shape[1]
        gate_TN, up_TN = x_TD @ gate_ND.T, x_TD @ up_ND.T
        return masked_activation(gate_TN, up_TN, mask_TE, expert_N, None, activation) @ down_ND
    order_R = chosen_TK.flatten().argsort(stable=True)
    counts_E = (mask_TE > 0).sum(0)
    x_RD = _rows(x_TD, order_R // num_chosen)
    # Each row belongs to one expert, whose entry of the mask applies to all its neurons.
    one_S = torch.zeros(gate_ESD.shape[1], dtype=torch.long, device=x_TD.device)
    hidden_RS = masked_activation(
        _grouped(x_RD, gate_ESD.transpose(1, 2), counts_E),
        _grouped(x_RD, up_ESD.transpose(1, 2), counts_E),
        mask_TE.gather(1, chosen_TK).flatten()[order_R].unsqueeze(1),
        one_S,
        activation=activation,
    )
    output_RD = _grouped(hidden_RS, down_ESD, counts_E)
    # A gather and a sum instead of a scatter: the result has the same bits every time.
    return _rows(output_RD, order_R.argsort()).view(len(x_TD), num_chosen, -1).sum(dim=1)


def _rows(x_TD: Tensor, row_R: Tensor) -> Tensor:
    """Rows by their numbers; the faster way on a CPU has a gradient without an order elsewhere."""
    return x_TD.index_select(0, row_R) if x_TD.device.type == "cpu" else x_TD[row_R]


def whole_is_faster(device: torch.device, dtype: torch.dtype, active: float, size: int) -> bool:
    """Whether computing all experts under a mask is faster than computing only the active ones."""
    if device.type != "cpu":  # grouped products of float32 are a loop there, which waits
        return dtype == torch.float32
    # Measured: faster from an active share of 0.3 with 16 or 32 neurons, not with 48 or 128.
    return size < 48 and active >= 0.3


def runs_grouped(dtype: torch.dtype, *widths: int) -> bool:
    """Whether `F.grouped_mm` takes such matrices: 16 or 32 bits, rows of multiples of 16 bytes."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return dtype in dtypes and all(width * dtype.itemsize % 16 == 0 for width in widths)


def _grouped(rows_RA: Tensor, weight_EAB: Tensor, counts_E: Tensor) -> Tensor:
    """Each row times its group's matrix; rows are sorted by group, with `counts_E` per group."""
    if runs_grouped(rows_RA.dtype, *weight_EAB.shape[1:]):
        if weight_EAB.requires_grad:
            # On Blackwell the gradient of a group without rows is not zero: pytorch issue 172439.
            weight_EAB = weight_EAB.view_as(weight_EAB)
            empty_E11 = (counts_E == 0)[:, None, None]
            weight_EAB.register_hook(  # type: ignore[no-untyped-call]
                lambda grad_EAB: grad_EAB.masked_fill(empty_E11, 0.0)
            )
        return F.grouped_mm(rows_RA, weight_EAB, offs=counts_E.cumsum(0).to(torch.int32))
    groups = zip(torch.split(rows_RA, counts_E.tolist()), weight_EAB.unbind(), strict=True)
    return torch.cat([rows @ weight_AB for rows, weight_AB in groups])
