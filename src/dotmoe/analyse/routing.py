"""Which experts the masked model runs for each token: what most analyses start from."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.export.routers import at_routers
from dotmoe.layout import ExpertLayout
from dotmoe.models.dense import DenseModel
from dotmoe.moe.router import router_logits
from dotmoe.progress import Update, no_update

FORWARD_TOKENS = 4096
"""Tokens of one forward pass at most, unless one block has more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """Experts that run for each token of a text, by split layer."""

    layers: tuple[int, ...]
    """Numbers of the split layers (L)."""
    chosen_LTK: Int[Tensor, "L T K"]
    """Experts of each token, the one with the largest logit first; int16, on the CPU."""
    num_experts: int
    """Experts a layer (E)."""


def captured_routes(
    dense: DenseModel,
    layout: ExpertLayout,
    tokens_BT: Int[Tensor, "B T"],
    on_progress: Update = no_update,
) -> Routes:
    """Run the masked model on a text and note what its routers choose (eq:router_topk).

    The masked model is what the experts compute, so a router sees what it will see in the export.
    Memory: one forward pass without the head, and 2 bytes a token, layer and active expert.

    Args:
        dense: Dense model, or what finetuning left of it.
        layout: Experts, routers and k.
        tokens_BT: Text; rows do not see each other.
        on_progress: Told blocks done and blocks in all.
    """
    layers = tuple(layout.moe_layers)
    found: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def look(layer: int, x_TD: Tensor) -> None:
        logits_TE = router_logits(x_TD, layout.router_LED[layer].to(x_TD.device))
        chosen_TK = logits_TE.topk(layout.active_experts, dim=1).indices
        found[layer].append(chosen_TK.to(torch.int16).cpu())

    done = 0
    for rows in _passes(tokens_BT):
        at_routers(dense, layout, rows, look)
        done += len(rows)
        on_progress(done, len(tokens_BT))
    return Routes(
        layers=layers,
        chosen_LTK=torch.stack([torch.cat(found[layer]) for layer in layers]),
        num_experts=layout.num_experts,
    )


def router_inputs(
    dense: DenseModel,
    layout: ExpertLayout,
    tokens_BT: Int[Tensor, "B T"],
    layer: int,
    wanted_P: Int[Tensor, " P"],
) -> Float[Tensor, "P D"]:
    """What one split layer's router and FFN see of some tokens, in the masked model's dtype.

    `wanted_P` are their places in the flattened text, ascending.
    """
    kept: list[Tensor] = []
    start = 0
    for rows in _passes(tokens_BT):
        here = wanted_P[(wanted_P >= start) & (wanted_P < start + rows.numel())] - start
        start += rows.numel()

        def look(index: int, x_TD: Tensor, here: Tensor = here) -> None:
            if index == layer:
                kept.append(x_TD[here.to(x_TD.device)])

        if len(here):
            at_routers(dense, layout, rows, look)
    return torch.cat(kept)


def _passes(tokens_BT: Int[Tensor, "B T"]) -> Iterator[Tensor]:
    """Blocks of each forward pass."""
    yield from torch.split(tokens_BT, max(1, FORWARD_TOKENS // tokens_BT.shape[1]))


def chosen_mask(chosen_TK: Int[Tensor, "T K"], num_experts: int) -> Float[Tensor, "T E"]:
    """Routing mask R of a layer: 1 where the expert runs for the token, else 0; float32."""
    mask_TE = torch.zeros(len(chosen_TK), num_experts)
    return mask_TE.scatter_(1, chosen_TK.long(), 1.0)
