"""Encoding of weights: sizes, tolerances, what falls back, what is refused."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from dotmoe.errors import UserError
from dotmoe.gguf_export import GgufConfig, write_dense_gguf
from dotmoe.gguf_export.weight_types import (
    GGML_TYPES,
    decode,
    encode,
    stored_bytes,
    stored_type,
    tolerance,
)

BITS = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8.5, "q4_0": 4.5}


def stored(rows, kind):
    """As the gguf package's reader gives it: whole rows, bytes unless the numbers are plain."""
    plain = {Kind.F32: np.float32, Kind.F16: np.float16}
    encoded = np.frombuffer(encode(rows, kind), dtype=plain.get(kind, np.uint8))
    return encoded.reshape(len(rows), -1)


@pytest.mark.parametrize("name", list(GGML_TYPES))
@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 300.0])
def test_values_come_back_within_the_tolerance_and_not_far_below_it(name, scale):
    kind = GGML_TYPES[name]
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(64, 96, generator=generator) * scale
    rows[0] = 0.0
    rows[1, ::2] = rows[1].abs().max()
    rows[2, :] = -rows[1]
    found = stored(rows, kind)
    assert found.nbytes == stored_bytes(rows.numel(), kind) == rows.numel() * BITS[name] / 8
    error = (decode(found, kind) - rows).abs()
    allowed = tolerance(found, kind)
    assert (error <= allowed).all()
    if name == "f32":
        assert not error.any()
    elif scale >= 1e-2:
        # A tolerance that were far too wide would check nothing.
        assert error.max() > 0.3 * allowed[error.flatten().argmax() // 96].max()
        assert allowed.mean() < {"q4_0": 0.5, "q8_0": 0.02}.get(name, 5e-3) * scale


def test_a_neighbouring_code_is_out_of_tolerance():
    rows = torch.linspace(-1, 1, 64).view(2, 32)
    for name in ("q8_0", "q4_0"):
        kind = GGML_TYPES[name]
        found = stored(rows, kind).copy()
        found[0, 10] ^= 0x22  # two steps, in both nibbles of a 4-bit code
        outside = (decode(found, kind) - rows).abs() > tolerance(found, kind)
        assert outside.any(), name


def test_what_is_stored_as_what():
    assert stored_type("exact", 64, "q4_0") == Kind.F32
    assert stored_type("embedding", 64, "q4_0") == Kind.Q8_0
    assert stored_type("matrix", 64, "q4_0") == Kind.Q4_0
    assert stored_type("matrix", 40, "q4_0") == Kind.F16
    assert stored_type("embedding", 40, "q8_0") == Kind.F16
    assert stored_type("matrix", 40, "bf16") == Kind.BF16


def test_what_float16_cannot_hold_is_refused(dense_of, tokens_BT, tmp_path):
    with pytest.raises(OverflowError, match="70000 does not fit"):
        encode(torch.full((1, 32), 70000.0), Kind.F16)
    dense = dense_of("llama")
    from dotmoe.gguf_export import file_writer

    def too_large(rows, kind):
        return encode(rows * 1e6, kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_writer, "encode", too_large)
        with pytest.raises(UserError, match=r"cannot be stored as F16.*Choose type bf16 or f32"):
            write_dense_gguf(dense, tmp_path / "out", GgufConfig(type="f16"), tokens_BT)
    assert not list(tmp_path.iterdir())
