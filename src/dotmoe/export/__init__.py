"""STAGE export: the files of a dense checkpoint and an `ExpertLayout` become a servable model."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from dotmoe.checkpoint.on_disk import on_disk
from dotmoe.checkpoint.tensors import Tensors
from dotmoe.errors import UserError, VerificationError, nearest
from dotmoe.export import edit
from dotmoe.export.architectures import FORMATS
from dotmoe.export.card import write_model_card
from dotmoe.export.edit import require_free_k
from dotmoe.export.format import Conversion, Format, GgufConfig
from dotmoe.export.record import RECORD_FILE, ExportRecord, record_of, require_intact
from dotmoe.export.routers import routing_notes, routing_problems, scale_routers
from dotmoe.export.transformers_format import TransformersFormat
from dotmoe.export.verify import Verification, sample_tokens
from dotmoe.files import complete_folder
from dotmoe.granularity import Granularity
from dotmoe.layout import ExpertLayout
from dotmoe.models.dense import DenseModel
from dotmoe.options import above, at_least

__all__ = [
    "FORMATS",
    "GGUF_NAMES",
    "ExportConfig",
    "ExportRecord",
    "GgufConfig",
    "Verification",
    "VerificationError",
    "export",
    "export_dtype",
    "format_for",
    "format_named",
    "require_exportable",
    "require_free_k",
    "require_intact",
    "set_active_experts",
    "write_model_card",
]

AUTO = "auto"
GGUF_NAMES = ("gguf", "gguf_glm4moe", "gguf_llama", "gguf_dense")
"""`gguf` is the first of the next two that can hold the model; `gguf_dense` is the dense model."""
UNVERIFIED = "_unverified"
"""Ending of the folder of an export that failed its verification."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig:
    """What is written, and how carefully it is checked."""

    format: str = AUTO
    """Stock architecture to write: glm4_moe, mixtral, qwen2_moe, qwen3_moe, granitemoe, flex_olmo,
    or auto: glm4_moe where it can hold the model, else the family's native twin. From a finished
    run `dotmoe export` also writes gguf, gguf_glm4moe, gguf_llama and gguf_dense."""
    export_dtype: Literal["source", "float32", "bfloat16"] = "source"
    """Dtype of the written weights. `source` keeps that of every dense tensor, bit for bit; float16
    cannot hold the scaled routers and must be given another."""
    max_shard_gib: Annotated[float, above(0)] = 4.0
    """Largest weight file, in GiB, above 0."""
    scale_tokens: Annotated[int, at_least(1)] = 2048
    """Tokens of text from which the scale of the routers is chosen, at least 1."""
    verify_tokens: Annotated[int, at_least(1)] = 512
    """Tokens of text on which the export is compared with the masked dense model, at least 1."""


def explained() -> str:
    """A line for each format: who runs it, and whether k stays free."""
    lines = [
        f"{name}: runs in {', '.join(form.servers)}; k "
        f"{'can be edited' if form.active_experts_editable else 'is fixed'}."
        for name, form in FORMATS.items()
    ]
    return "\n\n".join(lines)


def formats_like(name: str) -> dict[str, Format]:
    """The formats of the container that a name asks for, in order of preference.

    Raises:
        UserError: There is no such format; the nearest name is given. Or gguf is not installed.
    """
    if name == AUTO or name in FORMATS:
        return dict(FORMATS)
    if name in GGUF_NAMES:
        from dotmoe.export import gguf_file, gguf_format  # an extra; the first says so

        assert gguf_file
        return {form.name: form for form in gguf_format.GGUF_FORMATS}
    names = [*FORMATS, *GGUF_NAMES]
    raise UserError(
        f"export format is {name!r}, which dotmoe cannot write. "
        f"Formats: {AUTO}, {', '.join(names)}.{nearest(name, names)}"
    )


def format_named(name: str) -> TransformersFormat:
    """The Transformers format of that name.

    Raises:
        UserError: There is none; the nearest name is given.
    """
    formats_like(name)
    return FORMATS[name]


def export_dtype(dense: DenseModel, config: ExportConfig) -> torch.dtype:
    """Dtype of routers and experts, from the checkpoint's files.

    Raises:
        UserError: The checkpoint's dtype cannot be kept.
    """
    if config.format in GGUF_NAMES:
        return torch.float32
    if config.export_dtype != "source":
        dtype: torch.dtype = getattr(torch, config.export_dtype)
        return dtype
    _, stored = Tensors.of(dense).describe(dense.family.ffn_tensor(0, "gate"))
    if stored not in (torch.float32, torch.bfloat16):
        raise UserError(
            f"The weights in {dense.folder} are {stored}, whose range cannot hold the scaled "
            "routers. Set --export-dtype to float32 (exact) or bfloat16 (rounds the weights)."
        )
    return stored


def require_exportable(
    dense: DenseModel, granularity: Granularity, config: ExportConfig
) -> torch.dtype:
    """Refuse what export would refuse, before anything is trained; cheap.

    Returns:
        `export_dtype`.

    Raises:
        UserError: Unknown format, or a model, split or dtype that it cannot hold exactly.
    """
    if config.format in GGUF_NAMES:
        raise UserError(
            f"export format {config.format} is written from a finished run: convert to a "
            f"Transformers format first, then dotmoe export RUN OUT --format {config.format}."
        )
    dtype = export_dtype(dense, config)
    format_for(dense, granularity, config.format, dtype)
    return dtype


def format_for(
    dense: DenseModel, granularity: Granularity, name: str, dtype: torch.dtype
) -> Format:
    """The format of that name, or for `auto` the first that can hold the model.

    Raises:
        UserError: None can; or that one cannot, and then those that can are named.
    """
    if not 0 <= granularity.first_dense_layers < dense.widths.layers:
        raise UserError(
            f"first_dense_layers is {granularity.first_dense_layers}, but the model has "
            f"{dense.widths.layers} layers, of which at least one must be split. "
            f"Choose 0 to {dense.widths.layers - 1}."
        )
    forms = formats_like(name)
    refusals = {each: form.refusal(dense, granularity, dtype) for each, form in forms.items()}
    able = [each for each, refusal in refusals.items() if refusal is None and forms[each].splits]
    if name not in forms and able:
        return forms[able[0]]
    form = forms.get(name) or next(iter(forms.values()))
    refusal = refusals[form.name]
    if refusal is not None:
        others = f" Formats that can hold it: {', '.join(able)}." if able else ""
        raise UserError(refusal + others)
    return form


def require_fit(dense: DenseModel, layout: ExpertLayout) -> None:
    """Refuse a layout of another model.

    Raises:
        UserError: Layers, FFN neurons or model width differ.
    """
    widths = dense.widths
    expected = (widths.layers, widths.ffn, widths.model)
    found = (layout.num_layers, layout.num_neurons, layout.router_LED.shape[2])
    if expected != found:
        raise UserError(
            f"The layout is for {found} layers, FFN neurons and model width, but {dense.source} "
            f"has {expected}. Use the layout of this model."
        )


def export(
    dense: DenseModel,
    layout: ExpertLayout,
    out: Path,
    config: ExportConfig,
    token_ids: Int[Tensor, "B T"],
    *,
    origin: DenseModel | None = None,
    gguf: GgufConfig = GgufConfig(),  # noqa: B008 - frozen
) -> ExportRecord:
    """Scale the routers, write the folder, verify it, and only then give it its name.

    Weights are read from the files of `dense.folder`, whatever `dense.model` holds, and written
    tensor by tensor: writing needs memory for one dense tensor. Verifying needs more, see `verify`.

    Args:
        dense: The dense model, loaded or only described; it says where to compute.
        layout: Experts, routers and k. Routers are rounded to the written dtype.
        out: Folder to create; must not exist, or be empty.
        config: See `ExportConfig`.
        token_ids: Real text, to scale the routers and to verify with.
        origin: The dense model that the work began with, where `dense` is what training made of
            it; None: `dense`.
        gguf: What is special to GGUF formats.

    Returns:
        What was done and measured; also written as `dotmoe.json`.

    Raises:
        UserError: The pair cannot be exported, the folder exists, or the disk is full.
        VerificationError: A runtime would route otherwise than the layout, or the written model
            computes something else. It lies in `OUT_unverified` then, with the reason on record.
        On any other exception nothing is left behind.
    """
    require_fit(dense, layout)
    dtype = export_dtype(dense, config)
    form = format_for(dense, layout.granularity, config.format, dtype)
    layout = replace(layout, router_LED=layout.router_LED.to(dtype).float())
    device = dense.device if dense.device.type != "meta" else torch.device("cpu")
    exact = on_disk(dense, device, torch.float32)
    sample_BT = sample_tokens(token_ids, config.scale_tokens, form.context(dense))
    gating = form.gating(layout.granularity)
    routers = []
    if form.splits:
        routers = scale_routers(exact, layout, sample_BT, gating, dtype, form.exponent)
    conversion = Conversion(
        dense=exact,
        tensors=Tensors.of(dense),
        layout=layout,
        exponents={scale.layer: scale.exponent for scale in routers},
        dtype=dtype,
        keeps_dtypes=config.export_dtype == "source",
        source=(origin or dense).source,
        gguf=gguf,
    )
    problems = routing_problems(routers, sample_BT.numel())
    unverified = _place_for(out)
    verification = None
    with complete_folder(unverified) as folder:
        files = form.write(conversion, folder, config)
        try:
            tokens_BT = sample_tokens(token_ids, config.verify_tokens, form.context(dense))
            verification, found = form.check(conversion, folder, tokens_BT)
            problems += found
        except VerificationError as error:
            problems.append(str(error))
        record = record_of(
            conversion,
            form,
            folder,
            name=unverified.name if problems else out.name,
            origin=origin or dense,
            files=files,
            routers=routers,
            verification=verification,
            problems=problems,
            notes=[*form.notes(conversion), *routing_notes(routers)],
        )
        (folder / RECORD_FILE).write_text(record.to_json())
        write_model_card(folder, record)
    if problems:
        more = f" ({len(problems)} such figures)" if len(problems) > 1 else ""
        raise VerificationError(
            f"{problems[0]}{more} The export is kept, unverified, as {unverified}."
        )
    if out.exists():
        out.rmdir()
    unverified.rename(out)
    return record


def _place_for(out: Path) -> Path:
    """Where an export lies until it is verified; what an earlier try left there is removed."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} exists already. Remove it, or export to another folder.")
    unverified = out.with_name(out.name + UNVERIFIED)
    if (unverified / RECORD_FILE).is_file():
        shutil.rmtree(unverified)
    return unverified


def set_active_experts(folder: Path, active_experts: int) -> ExportRecord:
    """Change how many experts of an exported folder run; see `edit.set_active_experts`."""
    name = ExportRecord.load(folder).format
    form = formats_like(name)[name]
    return edit.set_active_experts(folder, active_experts, form)
