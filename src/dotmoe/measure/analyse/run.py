"""Inputs of the analyses: held-out text, and its routing by the masked model."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.common.errors import UserError
from dotmoe.common.files import Values
from dotmoe.common.progress import Progress, Update, no_update
from dotmoe.export.routers import at_routers
from dotmoe.measure.config import AnalyseConfig
from dotmoe.method.layout import ExpertLayout, Layouts
from dotmoe.method.router import router_logits
from dotmoe.models.family import DenseModel
from dotmoe.models.load import load_described
from dotmoe.run.finished import FinishedRun

FORWARD_TOKENS = 4096
"""Maximum tokens of one forward pass; a single block may have more."""

Findings = tuple[Values, list[str]]
"""Values of an analysis, and a few sentences that summarise them."""


class AnalysedRun(FinishedRun):
    """A finished run to analyse; models and routing are loaded or computed on first access."""

    def __init__(self, asked: AnalyseConfig, progress: Progress) -> None:
        super().__init__(Path(asked.run))
        self.asked, self.progress = asked, progress
        heldout = self.text.heldout
        self.tokens: Tensor = heldout.tokens_BT[: max(1, asked.tokens // heldout.seq_len)]
        """Text to route: the first blocks of the held-out text."""
        self.layout = self.layouts[0]
        """The first layout: of FFNs, if they are split."""
        self.layers = layers = self.layout.moe_layers
        self.layer = layers[len(layers) // 3] if asked.layer is None else asked.layer
        """Layer whose expert outputs are shown."""
        if self.layer not in layers:
            raise UserError(
                f"layer is {self.layer}, but the split layers are {layers.start} to "
                f"{layers.stop - 1}. Choose one of them."
            )

    @cached_property
    def dense(self) -> DenseModel:
        """The dense checkpoint with the experts' weights (repaired or finetuned, if the run is)."""
        return load_described(self.described(), self.asked.load)

    @cached_property
    def routes(self) -> dict[str, Int[Tensor, "L T K"]]:
        """Experts that run for each token of the text; see `captured_routes`."""
        with self.progress.bar("route held-out text") as update:
            return captured_routes(self.dense, self.layouts, self.tokens, update)


def captured_routes(
    dense: DenseModel,
    layouts: Layouts,
    tokens_BT: Int[Tensor, "B T"],
    on_progress: Update = no_update,
) -> dict[str, Int[Tensor, "L T K"]]:
    """Experts that run for each token in each split layer, by target; int16, on the CPU.

    The expert with the largest logit is first (eq:router_topk). Rows are independent sequences.
    """

    def routes(layout: ExpertLayout) -> Int[Tensor, "L T K"]:
        chosen: dict[int, list[Tensor]] = {layer: [] for layer in layout.moe_layers}

        def look(layer: int, x_TD: Tensor) -> None:
            logits_TE = router_logits(x_TD, layout.router_LED[layer].to(x_TD.device))
            chosen_TK = logits_TE.topk(layout.active_experts, dim=1).indices
            chosen[layer].append(chosen_TK.to(torch.int16).cpu())

        _look_at_text(dense, layouts, tokens_BT, look, on_progress, layout.target)
        return torch.stack([torch.cat(parts) for parts in chosen.values()])

    return {layout.target: routes(layout) for layout in layouts}


def router_inputs(
    dense: DenseModel, layouts: Layouts, tokens_BT: Int[Tensor, "B T"], layer: int
) -> Float[Tensor, "T D"]:
    """Input of the router and the FFN of one split layer for the whole text, on the CPU."""
    kept: list[Tensor] = []

    def look(index: int, x_TD: Tensor) -> None:
        if index == layer:
            kept.append(x_TD.cpu())

    _look_at_text(dense, layouts, tokens_BT, look)
    return torch.cat(kept)


def _look_at_text(
    dense: DenseModel,
    layouts: Layouts,
    tokens_BT: Tensor,
    look: Callable[[int, Tensor], None],
    on_progress: Update = no_update,
    target: str = "ffn",
) -> None:
    """Run `at_routers` on the whole text; `on_progress` receives the number of blocks."""
    done = 0
    for rows in torch.split(tokens_BT, max(1, FORWARD_TOKENS // tokens_BT.shape[1])):
        at_routers(dense, layouts, rows, look, target)
        on_progress(done := done + len(rows), len(tokens_BT))
