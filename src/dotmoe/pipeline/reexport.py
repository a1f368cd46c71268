"""Export a finished run again: in another format or dtype, with another k."""

from dataclasses import replace
from pathlib import Path

from dotmoe.common.files import new_folder, require_place_for_weights
from dotmoe.common.options import changed, check
from dotmoe.common.progress import Update, no_update
from dotmoe.export.config import GGUF_DENSE
from dotmoe.export.record import ExportRecord, say_unread_edits
from dotmoe.export.write import export
from dotmoe.models.load import left_on_disk
from dotmoe.run.config import ReexportConfig
from dotmoe.run.finished import FinishedRun


def reexport(config: ReexportConfig, on_progress: Update = no_update) -> ExportRecord:
    """Export the experts of a run again, which does not change the run.

    The dense model's weights stay on disk: memory holds one decoder layer, the embedding or head.
    """
    check(config, changed(config))
    require_place_for_weights(Path(config.out))
    run, out = FinishedRun(Path(config.run)), new_folder(Path(config.out))
    say_unread_edits(run.folder.path_of("export"), "the new export")
    (layout, *others) = run.layouts
    is_dense = config.export.format == GGUF_DENSE
    described = run.origin() if is_dense else run.described()
    dense = left_on_disk(described, config.load)
    if config.active_experts is not None:
        layout = replace(layout, active_experts=config.active_experts)
    origin = None
    if run.has_own_weights and not is_dense:
        revision = run.folder.manifest.get("revision")
        origin = replace(described, source=run.model, revision=revision)
    layouts, tokens_BT = (layout, *others), run.text.heldout.tokens_BT
    return export(
        dense, layouts, out, config.export, tokens_BT, origin=origin, on_progress=on_progress
    )


def said_of_export(record: ExportRecord, out: str) -> list[str]:
    """What is said of a new export: its format, size and check, and the notes for serving it."""
    split = "dense"
    if record.num_experts:
        split = f"{record.active_experts} of {record.num_experts} experts"
    was_run = (record.verification or {}).get("run", True)  # None: a GGUF without llama.cpp
    verified = "verified" if was_run else "its bytes verified; not run without llama-cpp-python"
    line = (
        f"{out}: {record.format}, {split}, "
        f"{record.total_bytes:,} bytes in {record.dtype}, {verified}."
    )
    return [line, *(f"- {note}" for note in record.notes)]
