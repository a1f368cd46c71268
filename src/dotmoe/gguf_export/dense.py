"""The dense model itself as GGUF, to compare speed and perplexity with."""

from pathlib import Path

from jaxtyping import Int
from torch import Tensor

from dotmoe.artifacts import DenseModel
from dotmoe.checkpoint.tensors import Tensors
from dotmoe.errors import UserError
from dotmoe.files import complete_folder
from dotmoe.gguf_export.config import GgufConfig
from dotmoe.gguf_export.decoder import (
    DecoderForm,
    decoder_metadata,
    decoder_refusal,
    layer_tensors,
    outer_tensors,
)
from dotmoe.gguf_export.experts import dense_ffn_tensors
from dotmoe.gguf_export.llama import FORM
from dotmoe.gguf_export.record import GgufRecord
from dotmoe.gguf_export.written import put_on_record, run_where_possible, write_and_read_back

NAME = "gguf_dense"

_QWEN3 = DecoderForm(arch="qwen3", rotates_pairs=False, qk_norm=("head",), output_bias=False)


def write_dense_gguf(
    dense: DenseModel, out: Path, config: GgufConfig, token_ids: Int[Tensor, "B T"]
) -> GgufRecord:
    """Write `out/model-TYPE.gguf` of the unsplit model, checked as `export_gguf` does.

    Args:
        dense: The dense model; not changed.
        out: Folder to create; must not exist, or be empty.
        config: Number format, tokenizer and `verify_tokens`; `format` plays no part.
        token_ids: Real text to verify with.

    Raises:
        UserError: llama.cpp cannot hold it, the folder exists, or the disk is full.
        VerificationError: The file does not hold or compute what it should.
        On any exception nothing is left behind.
    """
    form = dense_form(dense)
    reason = decoder_refusal(dense, form, NAME)
    if reason is not None:
        raise UserError(reason)
    tensors = Tensors.of(dense)
    plan = outer_tensors(dense, tensors, form)
    for layer in range(dense.widths.layers):
        plan += layer_tensors(dense, tensors, form, layer)
        plan += dense_ffn_tensors(dense, tensors, layer)
    keys = {**decoder_metadata(dense, form), "feed_forward_length": dense.widths.ffn}
    with complete_folder(out) as folder:
        written = write_and_read_back(folder, dense, None, form, keys, plan, config)
        return put_on_record(
            written,
            name=out.name,
            format_name=NAME,
            run=run_where_possible(written, token_ids, exact_gates=True),
            routers=(),
            notes=(),
        )


def dense_form(dense: DenseModel) -> DecoderForm:
    """llama.cpp's architecture `qwen3` for a model with QK-norm, else `llama`."""
    return _QWEN3 if dense.family.traits(dense.config).qk_norm == "head" else FORM
