"""Leave the idlest experts of a finished run out for good, and export the smaller model.

    python experiments/idle_experts.py RUN OUT --share 0.1

The paper names this as future work. Idle are the experts whose neurons contribute the least energy
to the output of their FFN, over the tokens that run them, on the run's training text. Their count
of tokens says little: a few tokens with massive activations can dominate a layer. As many experts
run for a token as before, so a token that had chosen one that is gone runs its next choice.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from dotmoe.cli.arguments import settings as settings_of
from dotmoe.common.errors import UserError
from dotmoe.common.files import new_folder
from dotmoe.common.options import ARGUMENT
from dotmoe.export.config import ExportConfig
from dotmoe.export.record import ExportRecord
from dotmoe.export.routers import at_routers
from dotmoe.export.write import export
from dotmoe.method.calibrate import contributions, routed_sums
from dotmoe.method.layout import ALWAYS_ON, DROPPED, ExpertLayout, columns_of
from dotmoe.method.router import router_logits, top_k_mask
from dotmoe.models.config import LoadConfig
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.load import left_on_disk, load_described
from dotmoe.run.finished import FinishedRun

TOKENS = 16_384
"""Training tokens on which the energy of experts is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """A finished run, and how many of its experts go."""

    run: Annotated[Path, ARGUMENT]
    """Folder of a finished run."""
    out: Annotated[Path, ARGUMENT]
    """Folder to write; must be new or empty."""
    share: float = 0.1
    """Share of the experts of each layer that are left out, at least one and at most E - k."""


def drop_idle(run_folder: Path, out: Path, share: float, load: LoadConfig) -> ExportRecord:
    """Export a run without this share of its experts; the run is not changed.

    Raises a `UserError` if experts are made of heads, or more would go than do not run for a token.
    """
    run = FinishedRun(run_folder)
    layout, *others = run.layouts
    if layout.target != "ffn" or others:
        raise UserError(f"{run_folder} has experts made of heads, all of which are kept.")
    number = max(1, round(share * layout.num_experts))
    most = layout.num_experts - layout.active_experts
    if number > most:
        raise UserError(
            f"share is {share:g}, {number} of {layout.num_experts} experts, but "
            f"{layout.active_experts} run for a token. At most {most} can go."
        )
    described = run.described()
    tokens_BT = run.text.training.drawn(TOKENS)
    energy_LE = expert_energies(load_described(described, load), layout, tokens_BT)
    smaller = without_idlest(layout, energy_LE, number)
    origin = None
    if run.has_own_weights:
        revision = run.folder.manifest.get("revision")
        origin = replace(described, source=run.model, revision=revision)
    dense, heldout = left_on_disk(run.described(), load), run.text.heldout.tokens_BT
    return export(dense, (smaller,), new_folder(out), ExportConfig(), heldout, origin=origin)


@torch.no_grad()
def expert_energies(dense: DenseModel, layout: ExpertLayout, tokens_BT: Tensor) -> Tensor:
    """Energy that each expert contributes on a text to its FFN's output, by split layer, [L, E]."""
    layers = dense.family.layers(dense.model)
    ffns = {layer: dense.family.ffn(layers[layer]) for layer in layout.moe_layers}
    energies = {layer: torch.zeros(layout.num_experts) for layer in layout.moe_layers}

    def look(layer: int, x_TD: Tensor) -> None:
        energy_TN = contributions(ffns[layer], x_TD).square_()
        owner_N = layout.expert_of_neuron_LN[layer].to(x_TD.device)
        energy_TE = routed_sums(energy_TN, owner_N, layout.num_experts)
        logits_TE = router_logits(x_TD, layout.router_LED[layer].to(x_TD.device))
        runs_TE = top_k_mask(logits_TE, layout.active_experts)
        energies[layer] += (runs_TE * energy_TE).sum(dim=0).cpu()

    for rows in torch.split(tokens_BT, max(1, 4_096 // tokens_BT.shape[1])):
        at_routers(dense, (layout,), rows, look, layout.target)
    return torch.stack([*energies.values()])


def without_idlest(layout: ExpertLayout, energy_LE: Tensor, number: int) -> ExpertLayout:
    """A copy without the `number` experts of least energy in each split layer."""
    kept = layout.num_experts - number
    expert_LN = layout.expert_of_neuron_LN.clone()
    router_LED = layout.router_LED[:, :kept].clone()
    for layer, energy_E in zip(layout.moe_layers, energy_LE, strict=True):
        kept_E = energy_E.argsort(stable=True)[number:].sort().values
        # The last two places are of neurons always on, which stay so, and of dropped ones.
        new_E = torch.full((layout.num_experts + 2,), DROPPED, dtype=expert_LN.dtype)
        new_E[kept_E] = torch.arange(kept, dtype=expert_LN.dtype)
        new_E[layout.num_experts] = ALWAYS_ON
        expert_LN[layer] = new_E[columns_of(expert_LN[layer].long(), layout.num_experts)]
        router_LED[layer] = layout.router_LED[layer, kept_E]
    return replace(layout, expert_of_neuron_LN=expert_LN, router_LED=router_LED)


def main() -> None:
    settings = settings_of(Settings, __doc__)
    record = drop_idle(settings.run, settings.out, settings.share, LoadConfig())
    print(f"{settings.out}: {record.num_experts} experts, {record.total_bytes:,} bytes")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
