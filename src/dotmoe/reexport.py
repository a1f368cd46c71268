"""The experts of a finished run, exported again: in another format, dtype, or with another k."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from dotmoe.checkpoint.on_disk import on_disk
from dotmoe.distributed import resolved_device
from dotmoe.errors import UserError
from dotmoe.export import GGUF_NAMES, ExportConfig, ExportRecord, GgufConfig, export
from dotmoe.finished_run import FinishedRun, finished_run
from dotmoe.load import LoadConfig, describe_dense, resolved_dtype
from dotmoe.models.dense import DenseModel
from dotmoe.options import at_least, check


@dataclass(frozen=True, kw_only=True, slots=True)
class ReexportConfig:
    """A run, and how to write it."""

    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN")]
    """Folder of a run whose extract stage, or finetune stage, is finished."""
    out: Annotated[Positional[str], tyro.conf.arg(metavar="OUT")]
    """Folder to write; must not exist, or be empty."""
    active_experts: Annotated[int | None, at_least(1)] = None
    """Experts that run per token (k), 1 to E. Default: the run's."""
    export: ExportConfig = field(default_factory=ExportConfig)
    gguf_type: Literal["f32", "f16", "bf16", "q8_0", "q4_0"] = "f16"
    """Number format of a GGUF's matrices."""
    gguf_tokenizer: Literal["auto", "none"] = "auto"
    """auto: the model's tokenizer goes into the GGUF; none: it will take token ids only."""
    load: LoadConfig = field(default_factory=LoadConfig)

    def check_together(self) -> None:
        """Refuse options that say nothing about the format."""
        name, plain = self.export.format, ReexportConfig(run="", out="")
        ignored: dict[str, Any] = {"gguf_type": self, "gguf_tokenizer": self}
        if name in GGUF_NAMES:
            ignored = {"export_dtype": self.export, "max_shard_gib": self.export}
        if name == "gguf_dense":
            ignored["active_experts"] = self
        for option, holder in ignored.items():
            default = getattr(plain if holder is self else plain.export, option)
            if getattr(holder, option) != default:
                raise UserError(
                    f"--{option.replace('_', '-')} says nothing about format {name}. Leave it out."
                )


def reexport(config: ReexportConfig) -> ExportRecord:
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
    run = finished_run(Path(config.run))
    layout, heldout = run.layout, run.text.heldout
    described = describe_dense(run.weights)
    device = resolved_device(config.load.device)
    dense = on_disk(described, device, resolved_dtype(config.load.dtype, device))
    if not run.is_finetuned:  # whose weights lie in the run, and have checksums there
        run.require_same_model(dense.folder)
    if config.active_experts is not None:
        layout = layout.with_active_experts(config.active_experts)
    return export(
        dense,
        layout,
        Path(config.out),
        config.export,
        heldout.tokens_BT,
        origin=_origin(run, described) if run.is_finetuned else None,
        gguf=GgufConfig(type=config.gguf_type, tokenizer=config.gguf_tokenizer),
    )


def _origin(run: FinishedRun, finetuned: DenseModel) -> DenseModel:
    """The dense model that a finetuned run began with; its files need not be there any more."""
    try:
        return describe_dense(run.model)
    except UserError:
        return replace(finetuned, source=run.model, revision=None)
