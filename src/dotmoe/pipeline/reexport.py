"""Export a finished run again: in another format or dtype, with another k or fewer experts."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from dotmoe.common.errors import UserError
from dotmoe.common.files import new_folder
from dotmoe.common.options import at_least, check
from dotmoe.common.progress import Update, no_update
from dotmoe.export import export
from dotmoe.export.choice import GGUF_NAMES
from dotmoe.export.format import GgufConfig
from dotmoe.export.record import ExportRecord, set_active_experts
from dotmoe.measure.analyse.run import expert_energies
from dotmoe.method.layout import ExpertLayout
from dotmoe.models.family import DenseModel
from dotmoe.models.load import LoadConfig, left_on_disk
from dotmoe.run.finished import FinishedRun
from dotmoe.run.folder import export_folder

LOAD_TOKENS = 16384
"""Number of training tokens on which the energy of experts is measured to drop some."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReexportConfig:
    """A finished run, and how to export it; or an export whose k is to change in place."""

    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN")]
    """Folder of a run that has finished its extract stage, or its repair or finetune stage. With
    `in_place` also an exported folder, or a GGUF file."""
    out: Annotated[Positional[str | None], tyro.conf.arg(metavar="OUT")] = None
    """Folder to write; must be new or empty."""
    in_place: bool = False
    """Change the k of an export in place of writing another; its weights stay the same."""
    active_experts: Annotated[int | None, at_least(1)] = None
    """Number of experts that run per token (k), 1 to E. Default: that of the run."""
    drop_experts: Annotated[int, at_least(0)] = 0
    """Number of experts to leave out of each split layer: those with the least output energy on
    the run's text, at most E - k. Files become smaller; the same number of neurons runs."""
    export: GgufConfig = field(default_factory=GgufConfig)
    load: LoadConfig = field(default_factory=LoadConfig)

    def check_together(self) -> None:
        """Refuse options that do not apply to the format or to a change in place."""
        if self.in_place:
            alone = ReexportConfig(run=self.run, in_place=True, active_experts=self.active_experts)
            if self.active_experts is None or self != alone:
                raise UserError(
                    "--in-place changes k alone. Give --active-experts and nothing else, or OUT in "
                    "place of --in-place to write another export."
                )
        elif self.out is None:
            raise UserError("OUT is missing. Name a folder to write, or give --in-place.")
        name, plain = self.export.format, GgufConfig()
        is_gguf = name in GGUF_NAMES
        ignored = ("export_dtype", "max_shard_gib") if is_gguf else ("gguf_type", "gguf_tokenizer")
        options = [each for each in ignored if getattr(self.export, each) != getattr(plain, each)]
        if name == "gguf_dense":
            options += [each for each in ("active_experts", "drop_experts") if getattr(self, each)]
        for option in options:
            raise UserError(
                f"--{option.replace('_', '-')} does not apply to format {name}. Leave it out."
            )


def reexport(config: ReexportConfig, on_progress: Update = no_update) -> ExportRecord:
    """Export the experts of a run again, which does not change the run; or change k in place.

    The dense model's weights stay on disk: memory holds one decoder layer, the embedding or head.
    """
    check(config)
    if config.out is None:
        assert config.active_experts is not None  # checked
        path = Path(config.run)
        folder = path.parent if path.suffix == ".gguf" else export_folder(path)
        return set_active_experts(folder, config.active_experts)
    run, out = FinishedRun(Path(config.run)), new_folder(Path(config.out))
    layout, described = run.layout, run.described()
    dense = left_on_disk(described, config.load)
    if config.active_experts is not None:
        layout = replace(layout, active_experts=config.active_experts)
    if config.drop_experts:
        layout = _without_idlest(run, layout, dense, config.drop_experts, on_progress)
    origin = None
    if run.has_own_weights:
        revision = run.folder.manifest.get("revision")
        origin = replace(described, source=run.model, revision=revision)
    tokens_BT = run.text.heldout.tokens_BT
    return export(
        dense, layout, out, config.export, tokens_BT, origin=origin, on_progress=on_progress
    )


def _without_idlest(
    run: FinishedRun, layout: ExpertLayout, dense: DenseModel, num: int, on_progress: Update
) -> ExpertLayout:
    """The layout without the `num` experts per layer with the least energy on the run's text."""
    if layout.target != "ffn" or layout.beside:
        raise UserError(
            f"drop_experts is {num}, but {run.folder.path} has experts made of heads, all of which "
            "are kept. Leave it out."
        )
    most = layout.num_experts - layout.active_experts
    if num > most:
        raise UserError(
            f"drop_experts is {num}, but {layout.active_experts} of {layout.num_experts} experts a "
            f"layer run for a token. Choose at most {most}, or a smaller active_experts."
        )
    tokens_BT = run.text.training.drawn(LOAD_TOKENS)
    return layout.without_idlest(expert_energies(dense, layout, tokens_BT, on_progress), num)
