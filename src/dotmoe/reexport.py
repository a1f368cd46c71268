"""The experts of a finished run, exported again: in another format, dtype, or with another k."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from dotmoe.errors import UserError
from dotmoe.export import GGUF_NAMES, ExportRecord, GgufConfig, export
from dotmoe.finished_run import FinishedRun
from dotmoe.load import LoadConfig, describe_dense, left_on_disk
from dotmoe.models.dense import DenseModel
from dotmoe.options import at_least, check
from dotmoe.progress import Update, no_update


@dataclass(frozen=True, kw_only=True, slots=True)
class ReexportConfig:
    """A run, and how to write it."""

    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN")]
    """Folder of a run whose extract stage, or repair or finetune stage, is finished."""
    out: Annotated[Positional[str], tyro.conf.arg(metavar="OUT")]
    """Folder to write; must not exist, or be empty."""
    active_experts: Annotated[int | None, at_least(1)] = None
    """Experts that run per token (k), 1 to E. Default: the run's."""
    export: GgufConfig = field(default_factory=GgufConfig)
    load: LoadConfig = field(default_factory=LoadConfig)

    def check_together(self) -> None:
        """Refuse options that say nothing about the format."""
        name, plain = self.export.format, GgufConfig()
        is_gguf = name in GGUF_NAMES
        ignored = ("export_dtype", "max_shard_gib") if is_gguf else ("gguf_type", "gguf_tokenizer")
        given = [each for each in ignored if getattr(self.export, each) != getattr(plain, each)]
        if name == "gguf_dense" and self.active_experts is not None:
            given.append("active_experts")
        for option in given:
            raise UserError(
                f"--{option.replace('_', '-')} says nothing about format {name}. Leave it out."
            )


def reexport(config: ReexportConfig, on_progress: Update = no_update) -> ExportRecord:
    """Export the experts of a run again; the run itself is not changed.

    The dense model's weights stay on disk: memory holds those of one decoder layer, or of the
    embedding or head, at a time.

    Returns:
        The record of the export, which also lies in `config.out`.

    Raises:
        UserError: No finished run there, its model is gone or has changed, or whatever the export
            refuses. Nothing is left behind.
    """
    check(config)
    run = FinishedRun(Path(config.run))
    layout, heldout = run.layout, run.text.heldout
    described = run.described()
    dense = left_on_disk(described, config.load)
    if config.active_experts is not None:
        layout = layout.with_active_experts(config.active_experts)
    return export(
        dense,
        layout,
        Path(config.out),
        config.export,
        heldout.tokens_BT,
        origin=_origin(run, described) if run.has_own_weights else None,
        on_progress=on_progress,
    )


def _origin(run: FinishedRun, changed: DenseModel) -> DenseModel:
    """The dense model that such a run began with; its files need not be there any more."""
    try:
        return describe_dense(run.model)
    except UserError:
        return replace(changed, source=run.model, revision=None)
