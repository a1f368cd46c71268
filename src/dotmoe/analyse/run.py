"""A finished run that is analysed: its text, routed by the masked model, and its alignment."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated

import torch
import tyro
from jaxtyping import Float, Int
from torch import Tensor
from tyro.conf import Positional

from dotmoe.calibrate import contributions, expert_sums
from dotmoe.config import FinetuneRunConfig
from dotmoe.errors import UserError
from dotmoe.export.routers import at_routers
from dotmoe.files import Values
from dotmoe.finished_run import FinishedRun
from dotmoe.granularity import parts_of
from dotmoe.layout import ExpertLayout
from dotmoe.load import LoadConfig, load_dense
from dotmoe.models.family import DenseModel
from dotmoe.moe.router import router_logits
from dotmoe.options import at_least
from dotmoe.progress import Progress, Update, no_update
from dotmoe.run_folder import RunFolder

FORWARD_TOKENS = 4096
"""Tokens of one forward pass at most, unless one block has more."""

Findings = tuple[Values, list[str]]
"""Values of an analysis, and what they say in a few sentences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalyseConfig:
    """What to analyse of a finished run."""

    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN")]
    """Folder of a finished `dotmoe convert` or `dotmoe finetune`."""
    only: tuple[str, ...] = ()
    """Make these of expert_utilisation, routing_overlap, expert_outputs_tsne, layer_sensitivity,
    overhead_profile. Default: all that the run has something for."""
    tokens: Annotated[int, at_least(1)] = 32768
    """Tokens of the held-out text to route, at most; at least one block."""
    layer: Annotated[int | None, at_least(0)] = None
    """Layer whose expert outputs are shown, a split one. Default: the one at a third of the depth,
    as the paper's."""
    profile_steps: Annotated[int, at_least(1)] = 5
    """Alignment steps that are timed."""
    load: LoadConfig = field(default_factory=LoadConfig)


class AnalysedRun(FinishedRun):
    """A finished run; what takes time is made when it is first asked for."""

    def __init__(self, asked: AnalyseConfig, progress: Progress) -> None:
        super().__init__(Path(asked.run))
        self.asked, self.progress = asked, progress
        heldout = self.text.heldout
        self.tokens: Tensor = heldout.tokens_BT[: max(1, asked.tokens // heldout.seq_len)]
        """The text that is routed: the first blocks kept out of training."""
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
        """The weights that the experts are made of."""
        return load_dense(self.described().source, self.asked.load)

    @cached_property
    def original(self) -> DenseModel:
        """The dense model that the run began with."""
        if not self.has_own_weights:
            return self.dense
        return load_dense(self.origin().source, self.asked.load)

    @cached_property
    def routes(self) -> dict[str, Int[Tensor, "L T K"]]:
        """See `captured_routes`."""
        with self.progress.bar("route held-out text") as update:
            return captured_routes(self.dense, self.layout, self.tokens, update)

    @cached_property
    def aligned(self) -> RunFolder | None:
        """The run that was aligned: this one, or that which was finetuned, if it is there."""
        config, folder = self.config, self.folder
        if isinstance(config, FinetuneRunConfig):
            folder = RunFolder(Path(config.run))
        was = folder.holds("align") and (folder.stage("align") / "metrics.jsonl").is_file()
        return folder if was else None


def captured_routes(
    dense: DenseModel,
    layout: ExpertLayout,
    tokens_BT: Int[Tensor, "B T"],
    on_progress: Update = no_update,
) -> dict[str, Int[Tensor, "L T K"]]:
    """Experts that run for each token in each split layer, by target; int16, on the CPU.

    The largest logit is first (eq:router_topk). Rows of the text do not see each other.
    """

    def routes(part: ExpertLayout) -> Int[Tensor, "L T K"]:
        chosen: dict[int, list[Tensor]] = {layer: [] for layer in part.moe_layers}

        def look(layer: int, x_TD: Tensor) -> None:
            chosen[layer].append(_chosen(part, layer, x_TD).to(torch.int16).cpu())

        _look_at_text(dense, layout, tokens_BT, look, on_progress, part.target)
        return torch.stack([torch.cat(parts) for parts in chosen.values()])

    return {part.target: routes(part) for part in parts_of(layout)}


def expert_energies(
    dense: DenseModel,
    layout: ExpertLayout,
    tokens_BT: Int[Tensor, "B T"],
    on_progress: Update = no_update,
) -> Float[Tensor, "L E"]:
    """What the text gets of each expert of neurons, by split layer, on the CPU.

    The squared terms of its neurons in the FFN's output, summed over the tokens that run it; their
    number alone says little: few tokens with massive activations can be most of a layer.
    """
    layers = dense.family.layers(dense.model)
    ffns = {layer: dense.family.ffn(layers[layer]) for layer in layout.moe_layers}  # not masked
    sums = {layer: torch.zeros(layout.num_experts) for layer in ffns}

    def look(layer: int, x_TD: Tensor) -> None:
        energy_TN = contributions(ffns[layer], x_TD).square_()
        owner_N = layout.expert_of_neuron_LN[layer].to(x_TD.device)
        energy_TE = expert_sums(energy_TN, owner_N, layout.num_experts)
        runs_TE = torch.zeros_like(energy_TE).scatter_(1, _chosen(layout, layer, x_TD), 1.0)
        sums[layer] += (runs_TE * energy_TE).sum(dim=0).cpu()

    _look_at_text(dense, layout, tokens_BT, look, on_progress)
    return torch.stack(list(sums.values()))


def router_inputs(
    dense: DenseModel, layout: ExpertLayout, tokens_BT: Int[Tensor, "B T"], layer: int
) -> Float[Tensor, "T D"]:
    """What the router and the FFN of a split layer see of the whole text, on the CPU."""
    kept: list[Tensor] = []

    def look(index: int, x_TD: Tensor) -> None:
        if index == layer:
            kept.append(x_TD.cpu())

    _look_at_text(dense, layout, tokens_BT, look)
    return torch.cat(kept)


def _chosen(layout: ExpertLayout, layer: int, x_TD: Tensor) -> Int[Tensor, "T K"]:
    logits_TE = router_logits(x_TD, layout.router_LED[layer].to(x_TD.device))
    return logits_TE.topk(layout.active_experts, dim=1).indices


def _look_at_text(
    dense: DenseModel,
    layout: ExpertLayout,
    tokens_BT: Tensor,
    look: Callable[[int, Tensor], None],
    on_progress: Update = no_update,
    target: str = "ffn",
) -> None:
    """`at_routers` of a whole text; `on_progress` is told blocks."""
    done = 0
    for rows in torch.split(tokens_BT, max(1, FORWARD_TOKENS // tokens_BT.shape[1])):
        at_routers(dense, layout, rows, look, target)
        on_progress(done := done + len(rows), len(tokens_BT))
