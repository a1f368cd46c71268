"""Export a finished run again: in another format or dtype, with another k or fewer experts."""

from dataclasses import replace
from pathlib import Path

from dotmoe.common.errors import UserError
from dotmoe.common.files import new_folder
from dotmoe.common.options import check
from dotmoe.common.progress import Update, no_update
from dotmoe.export.record import ExportRecord, set_active_experts
from dotmoe.export.write import export
from dotmoe.measure.analyse.run import expert_energies
from dotmoe.method.layout import ExpertLayout
from dotmoe.models.family import DenseModel
from dotmoe.models.load import left_on_disk
from dotmoe.run.config import ReexportConfig
from dotmoe.run.finished import FinishedRun
from dotmoe.run.folder import export_folder

LOAD_TOKENS = 16384
"""Number of training tokens on which the energy of experts is measured to drop some."""


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
    (layout, *others), described = run.layouts, run.described()
    dense = left_on_disk(described, config.load)
    if config.active_experts is not None:
        layout = replace(layout, active_experts=config.active_experts)
    if config.drop_experts:
        if layout.target != "ffn" or others:
            raise UserError(
                f"drop_experts is {config.drop_experts}, but {config.run} has experts made of "
                "heads, all of which are kept. Leave it out."
            )
        layout = _without_idlest(run, layout, dense, config.drop_experts, on_progress)
    origin = None
    if run.has_own_weights:
        revision = run.folder.manifest.get("revision")
        origin = replace(described, source=run.model, revision=revision)
    layouts, tokens_BT = (layout, *others), run.text.heldout.tokens_BT
    return export(
        dense, layouts, out, config.export, tokens_BT, origin=origin, on_progress=on_progress
    )


def _without_idlest(
    run: FinishedRun, layout: ExpertLayout, dense: DenseModel, num: int, on_progress: Update
) -> ExpertLayout:
    """The layout without the `num` experts per layer with the least energy on the run's text."""
    most = layout.num_experts - layout.active_experts
    if num > most:
        raise UserError(
            f"drop_experts is {num}, but {layout.active_experts} of {layout.num_experts} experts a "
            f"layer run for a token. Choose at most {most}, or a smaller active_experts."
        )
    tokens_BT = run.text.training.drawn(LOAD_TOKENS)
    return layout.without_idlest(expert_energies(dense, layout, tokens_BT, on_progress), num)
