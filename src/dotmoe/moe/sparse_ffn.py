"""The trainable form of an MoE layer: experts as weights of their own, of which only k compute."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from dotmoe.artifacts import DenseModel
from dotmoe.distributed import whole
from dotmoe.layout import ExpertLayout
from dotmoe.models.traits import GatedFFN
from dotmoe.moe.expert_sums import expert_sums
from dotmoe.moe.losses import balance_loss, z_loss
from dotmoe.moe.router import Surrogate, router_logits, straight_through_mask

Unchosen = Literal["mean", "zero"]
"""What stands for d loss / d mask of an expert that did not run for a token, and so is not known.

`zero`: nothing. Since running an expert lowers the loss more often than not, the surrogate then
raises the logits of whatever was chosen, and routing collapses. `mean`: the mean over the experts
that did run, so that a chosen one rises or falls by how it compares with the other chosen ones.
"""

EXPERT_WEIGHTS = ("gate_ESD", "up_ESD", "down_ESD")
"""Names of the experts' parameters in a `SparseFFN`."""


@dataclass(kw_only=True)
class Routing:
    """What every sparse FFN of one model reads, and the losses that it leaves."""

    active_experts: int
    surrogate: Surrogate
    """Soft stand-in for the mask, through which the routers receive their gradient."""
    surrogate_temperature: float = 1.0
    unchosen: Unchosen = "mean"
    """What stands for the gradient of an expert that did not run."""
    enabled: bool = True
    """False: all experts run for every token, and no router does, as in the dense model."""
    z_losses: list[Tensor] | None = None
    """One a layer of the running forward pass; None: not wanted."""
    balance_losses: list[Tensor] | None = None

    def want_losses(self) -> None:
        """Collect the auxiliary losses of the next forward pass."""
        self.z_losses, self.balance_losses = [], []

    def take_losses(self) -> tuple[Tensor, Tensor]:
        """z-loss and balance loss of the last forward pass, averaged over layers.

        None is collected from here on: a layer that runs again in the backward pass would leave
        losses that hold all its activations.
        """
        z, balance = (torch.stack(x or []).mean() for x in (self.z_losses, self.balance_losses))
        self.z_losses = self.balance_losses = None
        return z, balance


class Router(nn.Module):
    """Router rows of one layer, always float32."""

    def __init__(self, rows_ED: Float[Tensor, "E D"]) -> None:
        super().__init__()
        self.weight_ED = nn.Parameter(rows_ED.to(torch.float32, copy=True))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Logits, [T, E] in float32 (eq:router_logits)."""
        return router_logits(x_TD, self.weight_ED)


class SparseFFN(nn.Module):
    """Takes the place of a dense FFN; its weights are parameters in the order of the experts.

    Neuron s of expert e is row [e, s] of the gate, up and down weights, each [E, S, D]. Made of a
    dense FFN on the meta device, only its experts' weights are there.
    """

    def __init__(self, dense: GatedFFN, layout: ExpertLayout, layer: int, routing: Routing) -> None:
        super().__init__()
        weights_on = dense.gate.weight.device
        device = layout.router_LED.device if weights_on.type == "meta" else weights_on
        neurons_ES = layout.neurons_of_expert(layer).to(device)
        shared_M = layout.shared_neurons(layer).to(device)
        self.neurons_ES: Tensor
        self.shared_M: Tensor
        self.register_buffer("neurons_ES", neurons_ES, persistent=False)
        self.register_buffer("shared_M", shared_M, persistent=False)
        self.routing = routing
        self.router = Router(layout.router_LED[layer].to(device))
        gate_ND, up_ND, down_ND = _rows(dense)
        self.gate_ESD, self.up_ESD, self.down_ESD = (
            nn.Parameter(rows_ND[neurons_ES]) for rows_ND in (gate_ND, up_ND, down_ND)
        )
        self.shared_gate_MD: nn.Parameter | None = None
        self.shared_up_MD: nn.Parameter | None = None
        self.shared_down_MD: nn.Parameter | None = None
        if len(shared_M):
            self.shared_gate_MD, self.shared_up_MD, self.shared_down_MD = (
                nn.Parameter(rows_ND[shared_M]) for rows_ND in (gate_ND, up_ND, down_ND)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]: the k experts of each token, and the shared one if any."""
        x_TD = x.reshape(-1, x.shape[-1])
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        compute_TD = x_TD.to(torch.get_autocast_dtype(device)) if autocast else x_TD
        experts = [
            weight.to(compute_TD.dtype) for weight in (self.gate_ESD, self.up_ESD, self.down_ESD)
        ]
        if self.routing.enabled:
            k = self.routing.active_experts
            mask_TE = self._route(x_TD)
            if self.routing.unchosen == "mean":
                mask_TE = mean_where_unknown(mask_TE)
            output_TD = expert_sums(compute_TD, mask_TE, k, *experts)
        else:
            output_TD = _gated(compute_TD, *(weight_ESD.flatten(0, 1) for weight_ESD in experts))
        if self.shared_gate_MD is not None:
            shared = (self.shared_gate_MD, self.shared_up_MD, self.shared_down_MD)
            weights = [weight.to(compute_TD.dtype) for weight in shared if weight is not None]
            output_TD = output_TD + _gated(compute_TD, *weights)
        return output_TD.view(x.shape)

    def _route(self, x_TD: Tensor) -> Tensor:
        routing = self.routing
        logits: Tensor = self.router(x_TD)
        mask = straight_through_mask(
            logits,
            routing.active_experts,
            surrogate=routing.surrogate,
            temperature=routing.surrogate_temperature,
        )
        # Computed even where they are not wanted: a layer that runs again must do the same again.
        z, balance = z_loss(logits), balance_loss(logits, mask)
        if routing.z_losses is not None and routing.balance_losses is not None:
            routing.z_losses.append(z)
            routing.balance_losses.append(balance)
        return mask

    def dense_rows(self) -> dict[str, Tensor]:
        """gate, up and (transposed) down of the dense FFN that this is made of, as it is now.

        Returns:
            [N, D] each, rows in the order of the neurons. Every rank must ask, if the weights are
            divided over ranks.
        """
        parts = {
            "gate": (self.gate_ESD, self.shared_gate_MD),
            "up": (self.up_ESD, self.shared_up_MD),
            "down": (self.down_ESD, self.shared_down_MD),
        }
        return {name: self._in_neuron_order(*weights) for name, weights in parts.items()}

    def _in_neuron_order(self, experts_ESD: Tensor, shared_MD: Tensor | None) -> Tensor:
        experts_ESD = whole(experts_ESD.detach())
        neurons_ES = self.neurons_ES.to(experts_ESD.device)
        num_neurons = neurons_ES.numel() + len(self.shared_M)
        rows_ND = experts_ESD.new_empty(num_neurons, experts_ESD.shape[2])
        rows_ND[neurons_ES.flatten()] = experts_ESD.flatten(0, 1)
        if shared_MD is not None:
            rows_ND[self.shared_M.to(rows_ND.device)] = whole(shared_MD.detach())
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


def mean_where_unknown(mask_TE: Float[Tensor, "T E"]) -> Float[Tensor, "T E"]:
    """The mask itself; its gradient is set, where the mask is 0, to the mean over where it is 1.

    For surrogates whose rows have a fixed sum this is the same as subtracting that mean where the
    mask is 1: a baseline for each token.
    """
    result: Tensor = _MeanWhereUnknown.apply(mask_TE)  # type: ignore[no-untyped-call]
    return result


class _MeanWhereUnknown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mask_TE: Tensor) -> Tensor:
        ctx.save_for_backward(mask_TE)
        return mask_TE.view_as(mask_TE)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> Tensor:
        mask_TE: Tensor = ctx.saved_tensors[0]
        known = grad_TE * mask_TE
        mean = known.sum(dim=1, keepdim=True) / mask_TE.sum(dim=1, keepdim=True)
        return known + (1 - mask_TE) * mean


def _rows(dense: GatedFFN) -> tuple[Tensor, Tensor, Tensor]:
    """Gate and up rows, and down columns as rows, [N, D] each."""
    return dense.gate.weight.detach(), dense.up.weight.detach(), dense.down.weight.detach().T


def _gated(x_TD: Tensor, gate_ND: Tensor, up_ND: Tensor, down_ND: Tensor) -> Tensor:
    """(SiLU(x W_gate) * (x W_up)) W_down (eq:ffn_intermediate, eq:ffn_output)."""
    return (F.silu(x_TD @ gate_ND.T) * (x_TD @ up_ND.T)) @ down_ND
