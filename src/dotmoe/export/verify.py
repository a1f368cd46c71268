"""Reload an exported folder with plain Transformers and compare it with the masked dense model."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Int
from safetensors import safe_open
from torch import Tensor

from dotmoe.artifacts import DenseModel
from dotmoe.export.architecture import OutputArchitecture
from dotmoe.export.dense_tensors import DenseTensors
from dotmoe.export.layer_check import LayerCheck, LayerReference, checked_run
from dotmoe.export.reference import (
    logits_error,
    logits_of,
    reference_logits,
    sample_tokens,
    top1_agreement,
)
from dotmoe.export.stock_loading import exported_on_disk
from dotmoe.export.verification_error import VerificationError
from dotmoe.layout import ExpertLayout

__all__ = [
    "VerificationError",
    "VerificationRecord",
    "VerifyConfig",
    "check_folder",
    "judge",
    "limits_of",
    "verify",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyConfig:
    """How much text, and what is tolerated."""

    tokens: int = 512
    """Tokens of real text to compare on, at least 1."""
    block_error: float | None = None
    """Float32: largest median relative error of a block; None: the architecture's own limit. At
    the recommended scale glm4_moe has 3e-4 for random routers, and 1e-3 where an expert of high
    logit dominates, as in the start from data."""
    block_tail_ratio: float = 5.0
    """Largest 99th percentile of the block errors, in those allowed for the median."""
    misrouted: float = 1e-2
    """Largest share of misrouted tokens in a layer, beyond that of the unscaled router in the
    dtype in which the runtimes compute logits, and beyond four standard errors of the sample."""
    logits_error: float = 5e-3
    """Float32: largest mean |difference| of logits, in standard deviations of the reference."""
    top1_agreement: float = 0.99
    """Float32: smallest share of tokens with the same most likely next token."""
    dense_error: float = 1e-3
    """Float32: largest `logits_error` against the dense model at k = E, for up to 4 layers; grows
    with the root of their number beyond, as every layer adds its own deviation of the gates."""
    block_ratio: float | None = None
    """Below float32: largest block error, in those of the masked FFN in the same dtype; None: the
    architecture's own limit."""
    logits_ratio: float = 1.5
    """Below float32: largest logits error, in those of the masked model in the same dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerificationRecord:
    """What was compared and how far apart it was. Errors are against float32 references."""

    loaded_class: str
    dtype: str
    tokens: int
    layers: list[LayerCheck]
    logits_error: float
    """Mean |difference| from the masked dense model, in standard deviations of its logits, with
    every token sent where the exported model sent it. Routing itself is judged by layer."""
    logits_floor: float
    """The same of the masked dense model run in the exported dtype; 0 for float32."""
    top1_agreement: float
    """Share of tokens with the masked dense model's most likely next token, routes as above."""
    own_routes_error: float
    """`logits_error` where both models route for themselves. Not judged: one near-tie that falls
    the other way changes all later tokens."""
    own_routes_top1_agreement: float
    """`top1_agreement` where both models route for themselves."""
    dense_error: float | None
    """`logits_error` against the dense model at k = E; None: the architecture's k is not free."""
    dense_floor: float
    """The same of the dense model run in the exported dtype; 0 for float32."""


@torch.no_grad()
def verify(
    dense: DenseModel,
    layout: ExpertLayout,
    folder: Path,
    token_ids: Int[Tensor, "B T"],
    config: VerifyConfig,
    output: OutputArchitecture,
) -> VerificationRecord:
    """Check an exported folder block by block, at its own k, and at k = E.

    Weights of the reference come from the dense checkpoint's files; routing and sums are exact.
    Weights of both models stay on disk, whatever `dense` does with its own. Memory holds one part
    at a time, whatever the depth: an exported layer, as stored and with its experts stacked, beside
    one projection of the dense FFN; or a dense layer in float32; or the embedding or head as stored
    and in float32. Of the text it holds activations and up to seven times the logits. Only models
    of up to `weights_on_disk.KEPT_BYTES` are held whole.

    Args:
        dense: The model that was exported; not changed.
        layout: What was exported.
        folder: The exported folder.
        token_ids: Real text; cut to `config.tokens` and to the exported context.
        config: See `VerifyConfig`.
        output: The architecture of the folder.

    Raises:
        VerificationError: Transformers cannot load the folder. Figures are left to `judge`.
        UserError: There is no text, or the model in memory is not the one in its folder.
    """
    dtype = check_folder(folder, output)
    tensors = DenseTensors.of(dense)
    tokens_BT = sample_tokens(token_ids, config.tokens, output.context(dense)).to(dense.device)
    model = exported_on_disk(folder, dense.device, dtype)
    blocks = LayerReference(dense=dense, tensors=tensors, layout=layout, output=output, dtype=dtype)
    run = checked_run(model, blocks, tokens_BT)
    at_full_TV = None
    if output.active_experts_editable:
        output.set_active_experts(model, layout.with_active_experts(layout.num_experts))
        at_full_TV = logits_of(model, tokens_BT)
    loaded_class = f"{type(model).__module__}.{type(model).__qualname__}"
    reference = reference_logits(dense, tensors, layout, tokens_BT, run.routes, dtype)
    return VerificationRecord(
        loaded_class=loaded_class,
        dtype=str(dtype).removeprefix("torch."),
        tokens=tokens_BT.numel(),
        layers=run.layers,
        logits_error=logits_error(run.logits_TV, reference.same_routes_TV),
        logits_floor=reference.masked_floor,
        top1_agreement=top1_agreement(run.logits_TV, reference.same_routes_TV),
        own_routes_error=logits_error(run.logits_TV, reference.own_routes_TV),
        own_routes_top1_agreement=top1_agreement(run.logits_TV, reference.own_routes_TV),
        dense_error=(None if at_full_TV is None else logits_error(at_full_TV, reference.dense_TV)),
        dense_floor=reference.dense_floor,
    )


def limits_of(output: OutputArchitecture, config: VerifyConfig) -> VerifyConfig:
    """The same limits with the architecture's own where none is given."""
    return replace(
        config,
        block_error=config.block_error or output.block_error,
        block_ratio=config.block_ratio or output.block_ratio,
    )


def judge(record: VerificationRecord, config: VerifyConfig) -> None:
    """Raise on the first figure beyond its limit; none of the limits may be None."""
    assert config.block_error is not None
    assert config.block_ratio is not None
    in_float32 = record.dtype == "float32"
    for index, layer in enumerate(record.layers):
        place = f"layer {index}"
        block = config.block_error if in_float32 else config.block_ratio * layer.block_floor
        _at_most(layer.misrouted_far, 0.0, f"{place}: share of tokens misrouted by a clear margin")
        share = config.misrouted + layer.misrouted_floor
        share += 4 * (share / record.tokens) ** 0.5
        _at_most(layer.misrouted, share, f"{place}: share of misrouted tokens")
        _at_most(layer.block_error, block, f"{place}: median relative block error")
        tail = config.block_tail_ratio * block
        _at_most(layer.block_error_tail, tail, f"{place}: 99th percentile of the block error")
    logits = config.logits_error
    at_full = config.dense_error * max(1.0, len(record.layers) / 4) ** 0.5
    if in_float32:
        disagreement = 1 - config.top1_agreement
        # Four standard errors of the sample, as for misrouted tokens.
        disagreement += 4 * (disagreement / record.tokens) ** 0.5
        _at_most(1 - record.top1_agreement, disagreement, "top-1 disagreement")
    else:
        # The slack is the float32 limit: gates are as far from 1 here as there.
        logits += config.logits_ratio * record.logits_floor
        at_full += config.logits_ratio * record.dense_floor
    _at_most(record.logits_error, logits, "mean logit error")
    if record.dense_error is not None:
        _at_most(record.dense_error, at_full, "mean logit error at k = E against the dense model")


def check_folder(folder: Path, output: OutputArchitecture) -> torch.dtype:
    """Check what needs no model: config keys, k and E, and no tensor without elements.

    Returns:
        The dtype that the config states.
    """
    config = json.loads((folder / "config.json").read_text())
    missing = [key for key in output.required_keys if key not in config]
    if missing:
        raise VerificationError(f"config.json in {folder} lacks {missing[0]}. Export again.")
    experts, active = config[output.experts_key], config[output.active_experts_key]
    if not 1 <= active <= experts:
        raise VerificationError(
            f"{output.active_experts_key} is {active} in {folder}/config.json, but there are "
            f"{experts} experts. Choose 1 to {experts}."
        )
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if 0 in file.get_slice(name).get_shape():
                    raise VerificationError(f"{name} in {path} has no elements. Export again.")
    return cast(torch.dtype, getattr(torch, config["dtype"]))


def _at_most(value: float, limit: float, what: str) -> None:
    # Written so that NaN fails too.
    if not value <= limit:
        raise VerificationError(
            f"The exported model differs from the masked dense model: {what} is {value:.3g}, "
            f"limit {limit:.3g}. Report this as a defect of dotmoe."
        )
