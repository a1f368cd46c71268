"""Number formats of GGUF tensors: which tensor gets which, encoding, and its tolerance."""

from typing import Literal

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType, quants
from torch import Tensor

WeightType = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
"""`--type` of a GGUF: what its matrices are stored as."""
Role = Literal["matrix", "embedding", "exact"]
"""Embedding and head are `embedding`; norms, biases, routers and scales are `exact`."""

GGML_TYPES: dict[WeightType, GGMLQuantizationType] = {
    "f32": GGMLQuantizationType.F32,
    "f16": GGMLQuantizationType.F16,
    "bf16": GGMLQuantizationType.BF16,
    "q8_0": GGMLQuantizationType.Q8_0,
    "q4_0": GGMLQuantizationType.Q4_0,
}

FILE_TYPES: dict[WeightType, LlamaFileType] = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
}
"""Value of `general.file_type`, which llama.cpp only prints."""

_FLOAT16_MAX = float(torch.finfo(torch.float16).max)


def stored_type(role: Role, row_length: int, weights: WeightType) -> GGMLQuantizationType:
    """Number format of one tensor.

    What is added, routed by or multiplied into everything stays float32. Embedding and head are a
    large part of a model's error and a small part of its time, so 4-bit files keep them at 8 bits.
    A row that is no multiple of the format's block (32 weights) is stored as float16 instead.
    """
    if role == "exact":
        return GGMLQuantizationType.F32
    chosen = GGML_TYPES["q8_0" if role == "embedding" and weights == "q4_0" else weights]
    block, _ = GGML_QUANT_SIZES[chosen]
    return chosen if row_length % block == 0 else GGMLQuantizationType.F16


def stored_bytes(num_weights: int, kind: GGMLQuantizationType) -> int:
    """Size of a tensor in the file."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    assert num_weights % block == 0, (num_weights, kind)
    return num_weights // block * block_bytes


def encode(rows: Tensor, kind: GGMLQuantizationType) -> bytes:
    """Rows as they are stored.

    Args:
        rows: Whole rows, float32, on the CPU.
        kind: Their number format.

    Raises:
        OverflowError: A value is beyond what float16 holds.
    """
    if kind == GGMLQuantizationType.F16 and bool((rows.abs() > _FLOAT16_MAX).any()):
        raise OverflowError(f"{float(rows.abs().max()):g} does not fit into float16")
    encoded: np.ndarray = quants.quantize(rows.contiguous().numpy(), kind)
    return encoded.tobytes()


def decode(stored: np.ndarray, kind: GGMLQuantizationType) -> Tensor:
    """Values of a stored tensor, float32."""
    return torch.from_numpy(np.array(quants.dequantize(stored, kind), dtype=np.float32))


def tolerance(stored: np.ndarray, kind: GGMLQuantizationType) -> Tensor:
    """How far each stored value may lie from the weight it stands for, in the shape of `decode`.

    Read off the file: half a unit in the last place of float16 and bfloat16; of the block formats
    half a step, or a whole one at the end of the scale of q4_0, which reaches seven steps to one
    side and eight to the other. The scale of a block is itself rounded to float16.
    """
    values = decode(stored, kind)
    if kind == GGMLQuantizationType.F32:
        return torch.zeros_like(values)
    if kind == GGMLQuantizationType.F16:
        return values.abs() * 2.0**-11 * 1.01 + 2.0**-25
    if kind == GGMLQuantizationType.BF16:
        return values.abs() * 2.0**-8 * 1.01
    block, block_bytes = GGML_QUANT_SIZES[kind]
    scales = np.ascontiguousarray(stored.reshape(-1, block_bytes)[:, :2]).view(np.float16)
    steps = torch.from_numpy(scales.astype(np.float32)).abs().repeat(1, block).view(values.shape)
    if kind == GGMLQuantizationType.Q8_0:
        return steps * 0.57 + 2.0**-18
    return steps * 1.01 + 2.0**-21
