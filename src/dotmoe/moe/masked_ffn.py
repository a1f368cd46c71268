"""The training-time form of an MoE layer: the dense FFN under the mask R M^T (eq:moe_output)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dotmoe.models.traits import GatedFFN
from dotmoe.moe.losses import balance_loss, z_loss
from dotmoe.moe.masked_activation import masked_activation
from dotmoe.moe.router import Surrogate, router_logits, straight_through_mask, top_k_mask


@dataclass(kw_only=True)
class Masking:
    """What every masked layer of one model reads: assignment, plan, routers, k; and a switch.

    With `enabled` false each layer is its dense FFN again: the teacher is the same weights with the
    masks off, and never routes or rounds.
    """

    expert_of_neuron_LN: Int[Tensor, "L N"]
    """Hard assignment, M as expert numbers; with `always_on`, E: the neuron always runs."""
    router_LED: Float[Tensor, "L E D"] | tuple[Float[Tensor, "E D"], ...]
    """Router rows, or those of each layer by themselves."""
    active_experts: int
    plan_LNE: Float[Tensor, "L N E"] | tuple[Float[Tensor, "N E"], ...] | None = None
    """Soft plan, or that of each layer by itself; receives the assignment's gradient
    (eq:assignment_ste). None: nothing does."""
    surrogate: Surrogate | None = None
    """Soft stand-in for the router's gradient; None: the mask is not differentiated."""
    surrogate_temperature: float = 1.0
    always_on: bool = False
    """Some neurons belong to no expert. Only without a surrogate."""
    first_layer: int = 0
    """Layers before this one stay dense."""
    enabled: bool = True
    z_losses: list[Tensor] | None = None
    """One per masked layer of the running forward pass, in order of execution; None: not wanted."""
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


class MaskedFFN(nn.Module):
    """Takes the place of a dense FFN; same weights, same call, masked when `masking.enabled`."""

    def __init__(
        self, dense: nn.Module, projections: GatedFFN, masking: Masking, layer: int
    ) -> None:
        super().__init__()
        self.dense = dense
        self.masking = masking
        self.layer = layer
        self._projections = (projections,)  # in a tuple: not registered a second time

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]: (H * (R M^T)) W_down, only k experts' neurons contribute."""
        if not self.masking.enabled:
            dense_output: Tensor = self.dense(x)
            return dense_output
        (projections,) = self._projections
        x_TD = x.reshape(-1, x.shape[-1])
        masking = self.masking
        masked_TN = masked_activation(
            projections.gate(x_TD),
            projections.up(x_TD),
            self._route(x_TD),
            masking.expert_of_neuron_LN[self.layer],
            None if masking.plan_LNE is None else masking.plan_LNE[self.layer],
        )
        output: Tensor = projections.down(masked_TN).view(x.shape)
        return output

    def _route(self, x_TD: Tensor) -> Tensor:
        masking = self.masking
        logits = router_logits(x_TD, masking.router_LED[self.layer])
        if masking.surrogate is None:
            hard = top_k_mask(logits, masking.active_experts)
            return F.pad(hard, (0, 1), value=1.0) if masking.always_on else hard
        mask = straight_through_mask(
            logits,
            masking.active_experts,
            surrogate=masking.surrogate,
            temperature=masking.surrogate_temperature,
        )
        z, balance = z_loss(logits), balance_loss(logits, mask)
        if masking.z_losses is not None and masking.balance_losses is not None:
            masking.z_losses.append(z)
            masking.balance_losses.append(balance)
        return mask
