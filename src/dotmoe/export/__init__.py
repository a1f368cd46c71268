"""STAGE export: a dense checkpoint and an `ExpertLayout` become a stock MoE checkpoint."""

import difflib
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from dotmoe.artifacts import DenseModel
from dotmoe.errors import UserError
from dotmoe.export.architecture import (
    Conversion,
    OutputArchitecture,
    granularity_of,
    require_fit,
)
from dotmoe.export.dense_tensors import DenseTensors
from dotmoe.export.edit import require_free_k, set_active_experts
from dotmoe.export.flex_olmo import FlexOlmo
from dotmoe.export.glm4_moe import Glm4Moe
from dotmoe.export.granitemoe import GraniteMoe
from dotmoe.export.intact import checksums_of, config_sha256, require_intact
from dotmoe.export.mixtral import Mixtral
from dotmoe.export.model_card import write_model_card
from dotmoe.export.qwen2_moe import Qwen2Moe
from dotmoe.export.qwen3_moe import Qwen3Moe
from dotmoe.export.record import RECORD_FILE, ExportRecord, record_of
from dotmoe.export.reference import sample_tokens
from dotmoe.export.router_scale import router_scales
from dotmoe.export.routing_limits import RoutingLimits, require_routable
from dotmoe.export.shard_writer import WrittenShards, write_shards
from dotmoe.export.staging import require_new, staging
from dotmoe.export.verify import (
    VerificationError,
    VerificationRecord,
    VerifyConfig,
    judge,
    limits_of,
    verify,
)
from dotmoe.granularity import Granularity
from dotmoe.layout import ExpertLayout

__all__ = [
    "OUTPUTS",
    "ExportConfig",
    "ExportRecord",
    "VerificationError",
    "VerificationRecord",
    "VerifyConfig",
    "export",
    "export_dtype",
    "output_for",
    "output_named",
    "require_exportable",
    "require_free_k",
    "require_intact",
    "set_active_experts",
    "verify",
    "write_model_card",
]

OUTPUTS: dict[str, OutputArchitecture] = {
    "glm4_moe": Glm4Moe(),
    "mixtral": Mixtral(),
    "qwen2_moe": Qwen2Moe(),
    "qwen3_moe": Qwen3Moe(),
    "granitemoe": GraniteMoe(),
    "flex_olmo": FlexOlmo(),
}
"""In order of preference: the first that can hold a model is its default."""

AUTO = "auto"

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
    """Dtype of the written weights. `source` keeps the dense checkpoint's, bit for bit; float16
    cannot hold the scaled routers and must be given another."""
    max_shard_gib: float = 4.0
    """Largest weight file, in GiB, above 0."""
    scale_tokens: int = 2048
    """Tokens of text from which the scale of the routers is chosen, at least 1."""
    verify_tokens: int = 512
    """Tokens of text on which the export is compared with the masked dense model, at least 1."""


def explained() -> str:
    """A line for each format: who runs it, whether k stays free, and what is exact."""
    lines = [
        f"{name}: runs in {', '.join(output.servers)}; k "
        f"{'can be edited' if output.active_experts_editable else 'is fixed'}; {output.exactness}."
        for name, output in OUTPUTS.items()
    ]
    return "\n\n".join(lines)


def output_named(name: str) -> OutputArchitecture:
    """The output architecture of that name.

    Raises:
        UserError: There is none; the nearest name is given.
    """
    if name not in OUTPUTS:
        if name.startswith("gguf"):
            raise UserError(
                f"export format {name} is written from a finished run: convert to a Transformers "
                f"format first, then dotmoe export RUN OUT --format {name}."
            )
        near = difflib.get_close_matches(name, OUTPUTS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(
            f"export format is {name!r}, which dotmoe cannot write. "
            f"Formats: {AUTO}, {', '.join(OUTPUTS)}.{hint}"
        )
    return OUTPUTS[name]


def export_dtype(dense: DenseModel, config: ExportConfig) -> torch.dtype:
    """Dtype in which weights will be written, from the checkpoint's files; cheap.

    The extract stage rounds routers to it.

    Raises:
        UserError: The checkpoint's dtype cannot be kept.
    """
    if config.export_dtype != "source":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.export_dtype]
    _, stored = DenseTensors.of(dense).describe(dense.family.ffn_tensor(0, "gate"))
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
    dtype = export_dtype(dense, config)
    output_for(dense, granularity, config.format, dtype)
    return dtype


def output_for(
    dense: DenseModel, granularity: Granularity, name: str, dtype: torch.dtype
) -> OutputArchitecture:
    """The output architecture of that name, or for `auto` the first that can hold the model.

    Raises:
        UserError: None can; or that one cannot, and then those that can are named.
    """
    if not 0 <= granularity.first_dense_layers < dense.widths.layers:
        raise UserError(
            f"first_dense_layers is {granularity.first_dense_layers}, but the model has "
            f"{dense.widths.layers} layers, of which at least one must be split. "
            f"Choose 0 to {dense.widths.layers - 1}."
        )
    refusals = {each: output.refusal(dense, granularity, dtype) for each, output in OUTPUTS.items()}
    able = [each for each, refusal in refusals.items() if refusal is None]
    if name == AUTO and able:
        return OUTPUTS[able[0]]
    output = OUTPUTS["glm4_moe"] if name == AUTO else output_named(name)
    refusal = refusals[output.name]
    if refusal is not None:
        others = f" Formats that can hold it: {', '.join(able)}." if able else ""
        raise UserError(refusal + others)
    return output


def export(
    dense: DenseModel,
    layout: ExpertLayout,
    out: Path,
    config: ExportConfig,
    token_ids: Int[Tensor, "B T"],
) -> ExportRecord:
    """Scale the routers, write the checkpoint, verify it, and only then give it its name.

    Weights are read from `dense.folder` and written tensor by tensor: writing needs memory for one
    dense tensor. Verifying needs more, see `verify`.

    Args:
        dense: The dense model; not changed.
        layout: Experts, routers and k. Router entries must be exact in the written dtype.
        out: Folder to create; must not exist, or be empty.
        config: See `ExportConfig`.
        token_ids: Real text, to scale the routers and to verify with.

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
    output = output_for(dense, granularity_of(layout), config.format, dtype)
    calibration_BT = sample_tokens(token_ids, config.scale_tokens, output.context(dense))
    gating = output.gating(granularity_of(layout))
    scales = router_scales(dense, layout, calibration_BT, gating, dtype)
    conversion = Conversion(
        dense=dense,
        tensors=DenseTensors.of(dense),
        layout=layout,
        exponents={
            layer: scale.exponent for layer, scale in zip(layout.moe_layers, scales, strict=True)
        },
        dtype=dtype,
    )
    require_new(out)
    unverified = out.with_name(out.name + UNVERIFIED)
    if (unverified / RECORD_FILE).is_file():  # of an earlier try
        shutil.rmtree(unverified)
    verification, problem = None, None
    with staging(unverified) as folder:
        shards = _write(conversion, output, folder, config)
        try:
            limits = VerifyConfig(tokens=config.verify_tokens)
            verification = verify(dense, layout, folder, token_ids, limits, output)
            require_routable(layout.moe_layers, scales, calibration_BT.numel(), RoutingLimits())
            judge(verification, limits_of(output, limits))
        except VerificationError as error:
            problem = str(error)
        record = replace(
            record_of(
                out.name if problem is None else unverified.name,
                conversion,
                output,
                shards,
                scales,
                verification,
                problem,
            ),
            checksums=checksums_of(folder),
            config_sha256=config_sha256(folder, output.active_experts_key),
        )
        (folder / RECORD_FILE).write_text(record.to_json())
        write_model_card(folder, record)
    if problem is not None:
        raise VerificationError(f"{problem} The export is kept, unverified, as {unverified}.")
    if out.exists():
        out.rmdir()
    unverified.rename(out)
    return record


def _write(
    conversion: Conversion, output: OutputArchitecture, folder: Path, config: ExportConfig
) -> WrittenShards:
    dense = conversion.dense
    (folder / "config.json").write_text(json.dumps(output.config(conversion), indent=2) + "\n")
    dense.tokenizer.save_pretrained(folder)
    generation = dense.folder / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, folder / generation.name)
    shards = write_shards(
        output.tensors(conversion),
        folder,
        max_shard_bytes=int(config.max_shard_gib * 2**30),
    )
    conversion.tensors.forget()
    return shards
