"""Check a written file against the dense checkpoint: every key, every tensor, every value.

The dense tensors are rebuilt from the file by the way back, not by repeating the way there: experts
are put back neuron by neuron, heads are put back by halves.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dotmoe.artifacts import DenseModel
from dotmoe.checkpoint.tensors import EMBEDDING, HEAD, NORM, Tensors
from dotmoe.errors import VerificationError
from dotmoe.export.format import Conversion
from dotmoe.export.tensors import PROJECTIONS, carried_names
from dotmoe.gguf_export.architecture import GgufArchitecture
from dotmoe.gguf_export.decoder import OUTER, DecoderForm, rotated_heads
from dotmoe.gguf_export.gguf_file import GgufFile
from dotmoe.gguf_export.rope import halves_order
from dotmoe.layout import ALWAYS_ON, ExpertLayout

Read = Callable[[str], Tensor]
"""A tensor of a file by its GGUF name: its values, or how far off they may be."""


def check_metadata(file: GgufFile, expected: dict[str, Any]) -> None:
    """Compare all keys of a file with what was meant to be written.

    Raises:
        VerificationError: Names the key.
    """
    wanted = {"general.architecture": file.arch, **expected}
    strangers = file.keys ^ set(wanted)
    if strangers:
        raise VerificationError(f"{min(strangers)} is missing from {file.path}, or too much there.")
    for key, value in wanted.items():
        found = file.metadata(key)
        if isinstance(value, float):
            value = float(np.float32(value))
        if found != value:
            raise VerificationError(
                f"{key} in {file.path} is {str(found)[:40]!r} instead of {str(value)[:40]!r}. "
                "Report this as a defect of dotmoe."
            )


def check_names(file: GgufFile, expected: set[str]) -> None:
    """Refuse a file that lacks a tensor, has one too many, or one without elements.

    Raises:
        VerificationError: Names the tensor.
    """
    strangers = file.names ^ expected
    empty = {name for name in file.names if 0 in file.shape(name)}
    for name in sorted(strangers | empty):
        raise VerificationError(f"{name} in {file.path} is missing, empty or too much there.")


def check_dense_values(
    file: GgufFile, dense: DenseModel, form: DecoderForm, layout: ExpertLayout | None
) -> float:
    """Compare every dense weight with what the file holds of it.

    Returns:
        Largest root mean square error of a tensor, in root mean squares of the tensor.

    Raises:
        VerificationError: A weight is further off than its number format explains.
    """
    worst = 0.0
    tensors = Tensors.of(dense)
    for name in dense_names(dense):
        exact = tensors.read(name).float()
        stored = rebuilt(name, file.tensor, dense, form, layout)
        allowed = rebuilt(name, file.tolerance, dense, form, layout)
        error = (stored - exact).abs()
        if not bool((error <= allowed).all()):
            where = int((error - allowed).argmax())
            raise VerificationError(
                f"{name} came back from {file.path} as {float(stored.flatten()[where]):g} instead "
                f"of {float(exact.flatten()[where]):g} at entry {where}. Report this as a defect "
                "of dotmoe."
            )
        size = float(exact.square().mean().sqrt())
        worst = max(worst, float(error.square().mean().sqrt()) / size if size else 0.0)
    return worst


def check_moe_values(file: GgufFile, conversion: Conversion, output: GgufArchitecture) -> None:
    """Compare routers and constants with the layout; what pads a shared expert must be zero.

    Raises:
        VerificationError: Names the tensor.
    """
    layout = conversion.layout
    _, scales = output.active_experts_values(layout)
    for layer in layout.moe_layers:
        exact_ED = layout.router_LED[layer].cpu().double() * 2.0 ** -conversion.exponents[layer]
        prefix = f"blk.{layer}"
        _require_equal(file, f"{prefix}.ffn_gate_inp.weight", exact_ED.float())
        experts = torch.zeros(layout.num_experts)
        if f"{prefix}.exp_probs_b.bias" in file.names:
            _require_equal(file, f"{prefix}.exp_probs_b.bias", experts)
        for projection in PROJECTIONS:
            name = f"{prefix}.ffn_{projection}_shexp.weight"
            if name in file.names:
                padding = _neurons_first(file.tensor(name), projection)[layout.shared_size :]
                if bool(padding.any()):
                    raise VerificationError(f"{name} in {file.path} is not padded with zeros.")
    for name, value in scales.items():
        _require_equal(file, name, torch.full((layout.num_experts,), value))


def dense_names(dense: DenseModel) -> Iterator[str]:
    """Names of all tensors of a dense model, in LLaMA's form."""
    yield from (EMBEDDING, NORM)
    if not dense.config.tie_word_embeddings:
        yield HEAD
    for layer in range(dense.widths.layers):
        yield from carried_names(dense, layer)
        yield from (dense.family.ffn_tensor(layer, name) for name in PROJECTIONS)


def rebuilt(
    name: str, read: Read, dense: DenseModel, form: DecoderForm, layout: ExpertLayout | None
) -> Tensor:
    """A dense tensor, as a file holds it.

    Args:
        name: In LLaMA's form.
        read: Reads a tensor of the file.
        dense: The dense model.
        form: Architecture of the file.
        layout: Split of the FFNs; None: there is none.
    """
    if name in OUTER:
        return read(OUTER[name])
    layer = int(name.split(".")[2])
    for projection in PROJECTIONS:
        if name == dense.family.ffn_tensor(layer, projection):
            return _rebuilt_ffn(layer, projection, read, layout)
    stored = form.layer_name(name.removeprefix(f"model.layers.{layer}."))
    tensor = read(f"blk.{layer}.{stored}")
    if form.rotates_pairs and stored.startswith(("attn_q.", "attn_k.")):
        head_dim = dense.family.traits(dense.config).head_dim
        return halves_order(tensor, rotated_heads(dense, stored), head_dim)
    return tensor


def _rebuilt_ffn(layer: int, projection: str, read: Read, layout: ExpertLayout | None) -> Tensor:
    prefix = f"blk.{layer}.ffn_{projection}"
    if layout is None or layer not in layout.moe_layers:
        return read(f"{prefix}.weight")
    expert_of_N = layout.expert_of_neuron_LN[layer].cpu()
    stacked = read(f"{prefix}_exps.weight")
    rows = torch.empty(len(expert_of_N), _neurons_first(stacked[0], projection).shape[1])
    for expert, weights in enumerate(stacked):
        rows[expert_of_N == expert] = _neurons_first(weights, projection)
    if layout.shared_size:
        shared = _neurons_first(read(f"{prefix}_shexp.weight"), projection)
        rows[expert_of_N == ALWAYS_ON] = shared[: layout.shared_size]
    return _neurons_first(rows, projection)


def _neurons_first(weights: Tensor, projection: str) -> Tensor:
    """Neurons as rows, whichever projection; its own inverse."""
    return weights.T if projection == "down" else weights


def _require_equal(file: GgufFile, name: str, expected: Tensor) -> None:
    if not torch.equal(file.tensor(name), expected):
        raise VerificationError(
            f"{name} in {file.path} is not what was written. Report this as a defect of dotmoe."
        )
