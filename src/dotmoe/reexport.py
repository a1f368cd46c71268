"""The experts of a finished run, exported again: in another format, dtype, or with another k."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional

from dotmoe.checkpoint.on_disk import on_disk
from dotmoe.data import TokenBlocks
from dotmoe.distributed import resolved_device
from dotmoe.errors import UserError
from dotmoe.export import ExportConfig, ExportRecord, export
from dotmoe.finished_run import FinishedRun, finished_run
from dotmoe.layout import ExpertLayout
from dotmoe.load import LoadConfig, describe_dense, resolved_dtype
from dotmoe.models.dense import DenseModel
from dotmoe.options import check

if TYPE_CHECKING:
    from dotmoe.gguf_export import GgufRecord

GGUF_FORMATS = ("gguf", "gguf_glm4moe", "gguf_llama", "gguf_dense")
"""`gguf` is the first of the next two that can hold the model; `gguf_dense` is the dense model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReexportConfig:
    """A run, and how to write it."""

    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN")]
    """Folder of a run whose extract stage, or finetune stage, is finished."""
    out: Annotated[Positional[str], tyro.conf.arg(metavar="OUT")]
    """Folder to write; must not exist, or be empty."""
    active_experts: int | None = None
    """Experts that run per token (k), 1 to E. Default: the run's."""
    export: ExportConfig = field(default_factory=ExportConfig)
    gguf_type: Literal["f32", "f16", "bf16", "q8_0", "q4_0"] = "f16"
    """Number format of a GGUF's matrices."""
    gguf_tokenizer: Literal["auto", "none"] = "auto"
    """auto: the model's tokenizer goes into the GGUF; none: it will take token ids only."""
    load: LoadConfig = field(default_factory=LoadConfig)


def reexport(config: ReexportConfig) -> "ExportRecord | GgufRecord":
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
    if config.export.format in GGUF_FORMATS:
        return _as_gguf(config, dense, layout, heldout)
    origin = _origin(run, described) if run.is_finetuned else None
    out = Path(config.out)
    return export(dense, layout, out, config.export, heldout.tokens_BT, origin=origin)


def _origin(run: FinishedRun, finetuned: DenseModel) -> DenseModel:
    """The dense model that a finetuned run began with; its files need not be there any more."""
    try:
        return describe_dense(run.model)
    except UserError:
        return replace(finetuned, source=run.model, revision=None)


def _as_gguf(
    config: ReexportConfig, dense: DenseModel, layout: ExpertLayout, heldout: TokenBlocks
) -> "GgufRecord":
    from dotmoe.gguf_export import GgufConfig, export_gguf, write_dense_gguf  # an extra

    name, out = config.export.format, Path(config.out)
    gguf_config = GgufConfig(
        format="auto" if name == "gguf" else name,
        type=config.gguf_type,
        tokenizer=config.gguf_tokenizer,
        scale_tokens=config.export.scale_tokens,
        verify_tokens=config.export.verify_tokens,
    )
    if name == "gguf_dense":
        return write_dense_gguf(dense, out, gguf_config, heldout.tokens_BT)
    return export_gguf(dense, layout, out, gguf_config, heldout.tokens_BT)
