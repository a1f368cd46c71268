"""STAGE export: write a servable model from a dense checkpoint's files and an `ExpertLayout`."""

import logging
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from dotmoe.common.errors import UserError, VerificationError
from dotmoe.common.files import complete_folder, new_folder
from dotmoe.common.progress import Update, no_update
from dotmoe.common.worker import WorkerDiedError
from dotmoe.export.choice import ALL_RUN, NEEDS_OWN_CODE, OWN, context_note, format_for
from dotmoe.export.config import GGUF_NAMES, ExportConfig, GgufConfig
from dotmoe.export.format import EXPORTED, ConvertedModel, Format
from dotmoe.export.record import RECORD_FILE, ExportRecord, record_of
from dotmoe.export.routers import routing_problems, scale_routers
from dotmoe.export.verify import sample_tokens
from dotmoe.method.granularity import Splits
from dotmoe.method.layout import Layouts, splits_in
from dotmoe.models.checkpoint import Tensors
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.on_disk import on_disk
from dotmoe.models.tokenizer import tokenizer_notes

logger = logging.getLogger(__name__)

_WIDENED = (
    "The dense weights are float16, which cannot hold the scaled routers; they are written as "
    "float32, which is exact. --export-dtype bfloat16 halves the files and rounds the weights."
)


def export_dtype(dense: DenseModel, config: ExportConfig) -> torch.dtype:
    """Dtype of written routers and experts; `source` takes what is in `EXPORTED`."""
    if config.format in GGUF_NAMES:
        return torch.float32
    if config.export_dtype == "float32":
        return torch.float32
    if config.export_dtype == "bfloat16":
        return torch.bfloat16
    stored = Tensors.of(dense).dtype
    if stored not in EXPORTED:
        raise UserError(
            f"The weights in {dense.folder} are {stored}, but exports are float32 or bfloat16. Set "
            "--export-dtype to one of them, which rounds the weights."
        )
    return EXPORTED[stored]


def require_exportable(dense: DenseModel, splits: Splits, config: ExportConfig) -> torch.dtype:
    """Refuse, quickly and before any training, what export would refuse; return `export_dtype`."""
    dtype = export_dtype(dense, config)
    form = format_for(dense, splits, config.format, dtype)
    if form.name == OWN:
        logger.warning(NEEDS_OWN_CODE)
    if all(split.active_fraction == 1 for split in splits):
        logger.warning(ALL_RUN)
    return dtype


def export(
    dense: DenseModel,
    layouts: Layouts,
    out: Path,
    config: ExportConfig,
    token_ids: Int[Tensor, "B T"],
    *,
    origin: DenseModel | None = None,
    on_progress: Update = no_update,
) -> ExportRecord:
    """Scale the routers, write the folder, verify it, and only then rename it to `out`.

    Weights are read from the files of `dense.folder`, not from `dense.model`. Writing needs memory
    for one file, of a GGUF for one tensor; `verify` says what verification needs.

    Args:
        dense: The dense model, loaded or only described; its device is used for computation.
        layouts: The model's experts, routers and k. Routers are rounded to the written dtype.
        out: Folder to create; must be new or empty.
        config: Options; a GGUF format also accepts a `GgufConfig`.
        token_ids: Real text, used to scale the routers and to verify the export.
        origin: The original dense model, if `dense` is its repaired or finetuned successor.
        on_progress: Called with the number of tensors written, then of layers verified.

    Returns:
        The record of the export and its measurements; also written as `dotmoe.json`.

    Raises:
        UserError: The model and layouts cannot be exported, `out` exists, or the disk is full.
        VerificationError: A runtime would route differently from a layout, or the written model
            computes something else. The export is kept in `OUT_unverified` with a record of why.
    """
    dtype = export_dtype(dense, config)
    form = format_for(dense, splits_in(layouts), config.format, dtype)
    layouts = tuple(replace(each, router_LED=each.router_LED.to(dtype).float()) for each in layouts)
    config, notes = _without_float16(config, dense)
    out = new_folder(out)
    device = torch.device("cpu") if dense.weights == "meta" else dense.device
    exact = on_disk(dense, device, torch.float32)
    unverified = out.with_name(out.name + "_unverified")
    with complete_folder(out) as folder:
        _remove_earlier(unverified)
        sample_BT = sample_tokens(token_ids, config.scale_tokens, form.context(dense))
        routers = []
        if form.gating.score != "none":
            routers = scale_routers(exact, layouts[0], sample_BT, form.gating, dtype)
        converted = ConvertedModel(
            dense=exact,
            tensors=Tensors.of(dense),
            layouts=layouts,
            exponents={scale["layer"]: scale["exponent"] for scale in routers},
            dtype=dtype,
            config=config if isinstance(config, GgufConfig) else GgufConfig(**asdict(config)),
            origin=origin or dense,
            on_progress=on_progress,
        )
        files = form.write(converted, folder)
        tokens_BT = sample_tokens(token_ids, config.verify_tokens, form.context(dense))
        verification, problems = _verified(form, converted, folder, tokens_BT, unverified)
        problems = routing_problems(routers, sample_BT.numel()) + problems
        lowered = context_note(dense, splits_in(layouts), form, dtype)
        if lowered:
            notes.append(lowered)
        record = record_of(
            converted,
            form,
            folder,
            name=unverified.name if problems else out.name,
            files=files,
            routers=routers,
            verification=verification,
            problems=problems,
            notes=[*notes, *form.notes(converted), *tokenizer_notes(folder)],
            context_lowered=lowered,
        )
        record.write(folder)
        if problems:
            folder.rename(unverified)
            raise _unverified_error(problems, unverified)
    return record


def _without_float16(config: ExportConfig, dense: DenseModel) -> tuple[ExportConfig, list[str]]:
    """The options with float32 in place of a float16 that they would copy, and a note of that."""
    if config.export_dtype != "source" or Tensors.of(dense).dtype != torch.float16:
        return config, []
    notes = [] if config.format in GGUF_NAMES else [_WIDENED]
    return replace(config, export_dtype="float32"), notes


def _verified(
    form: Format, converted: ConvertedModel, folder: Path, tokens_BT: Tensor, unverified: Path
) -> tuple[Any, list[str]]:
    """What the check of a written folder measured, None if it broke; and what it found wrong."""
    try:
        verification, problems = form.check(converted, folder, tokens_BT)
    except (VerificationError, WorkerDiedError) as error:
        return None, [str(error).replace(str(folder), str(unverified))]
    return verification, list(problems)


def _remove_earlier(unverified: Path) -> None:
    """Remove the export that an earlier attempt left unverified; any other file is refused."""
    if (unverified / RECORD_FILE).is_file():
        shutil.rmtree(unverified)
    if unverified.exists():
        raise UserError(f"{unverified} exists and is not an export. Move it away.")


def _unverified_error(problems: list[str], unverified: Path) -> VerificationError:
    more = f" ({len(problems)} problems in all)" if len(problems) > 1 else ""
    return VerificationError(f"{problems[0]}{more} The unverified export is kept as {unverified}.")
