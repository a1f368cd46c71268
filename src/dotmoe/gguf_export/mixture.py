"""A MoE as GGUF: choose the architecture, scale the routers, write, read back, run."""

import difflib
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from dotmoe.artifacts import DenseModel
from dotmoe.checkpoint.tensors import Tensors
from dotmoe.errors import UserError
from dotmoe.export import require_fit
from dotmoe.export.format import Conversion, exported_context, granularity_of
from dotmoe.export.tensors import require_no_others
from dotmoe.export.verify import sample_tokens
from dotmoe.files import complete_folder
from dotmoe.gguf_export.architecture import GgufArchitecture
from dotmoe.gguf_export.config import AUTO, GgufConfig
from dotmoe.gguf_export.decoder import decoder_metadata, layer_tensors, outer_tensors
from dotmoe.gguf_export.experts import active_experts_refusal, dense_ffn_tensors
from dotmoe.gguf_export.gguf_file import GgufFile
from dotmoe.gguf_export.glm4moe import GgufGlm4Moe
from dotmoe.gguf_export.llama import GgufLlama
from dotmoe.gguf_export.read_back import check_moe_values
from dotmoe.gguf_export.record import GgufRecord
from dotmoe.gguf_export.router_check import check_routers, exponents_of
from dotmoe.gguf_export.tensor_plan import GgufTensor
from dotmoe.gguf_export.written import put_on_record, run_where_possible, write_and_read_back
from dotmoe.granularity import Granularity
from dotmoe.layout import ExpertLayout
from dotmoe.llama_cpp import most_active_experts

GGUF_OUTPUTS: dict[str, GgufArchitecture] = {
    "gguf_glm4moe": GgufGlm4Moe(),
    "gguf_llama": GgufLlama(),
}
"""In order of preference: the first has exactly binary gates."""


def gguf_refusal(dense: DenseModel, granularity: Granularity, name: str) -> str | None:
    """Why a model split that way cannot be written in a format (one sentence), or None."""
    output = GGUF_OUTPUTS[name]
    return output.refusal(dense, granularity) or active_experts_refusal(
        dense, granularity, output.num_moe_tensors
    )


def gguf_output_for(dense: DenseModel, granularity: Granularity, name: str) -> GgufArchitecture:
    """The format of that name, or for `auto` the first that can hold the model.

    Raises:
        UserError: Unknown name, or no format can hold the model, with the reasons.
    """
    if name != AUTO and name not in GGUF_OUTPUTS:
        near = difflib.get_close_matches(name, GGUF_OUTPUTS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(
            f"export format is {name!r}, which is no GGUF format of dotmoe. "
            f"Formats: {AUTO}, {', '.join(GGUF_OUTPUTS)}.{hint}"
        )
    candidates = list(GGUF_OUTPUTS) if name == AUTO else [name]
    refusals = {each: gguf_refusal(dense, granularity, each) for each in candidates}
    for each, refusal in refusals.items():
        if refusal is None:
            return GGUF_OUTPUTS[each]
    raise UserError(" ".join(dict.fromkeys(str(refusal) for refusal in refusals.values())))


def export_gguf(
    dense: DenseModel,
    layout: ExpertLayout,
    out: Path,
    config: GgufConfig,
    token_ids: Int[Tensor, "B T"],
) -> GgufRecord:
    """Write `out/model-TYPE.gguf`, read it back, run it, and only then give the folder its name.

    Weights are read from `dense.folder` and written by rows: writing needs memory for one dense
    tensor. Reading back needs a few times that; running the file, where llama-cpp-python is
    installed, memory for it and for a float32 copy of the dense model.

    Args:
        dense: The dense model; not changed.
        layout: Experts, routers and k.
        out: Folder to create; must not exist, or be empty.
        config: See `GgufConfig`.
        token_ids: Real text, to scale the routers and to verify with.

    Returns:
        What was done and measured; also written as `dotmoe.json`.

    Raises:
        UserError: The pair cannot be exported, the folder exists, or the disk is full.
        VerificationError: The file does not hold or compute what it should.
        On any exception nothing is left behind.
    """
    require_fit(dense, layout)
    output = gguf_output_for(dense, granularity_of(layout), config.format)
    tokens_BT = sample_tokens(token_ids, config.scale_tokens, exported_context(dense))
    routers = check_routers(dense, layout, output, tokens_BT)
    conversion = Conversion(
        dense=dense,
        tensors=Tensors.of(dense),
        layout=layout,
        exponents=exponents_of(routers),
        dtype=torch.float32,
    )
    require_no_others(conversion, output.name)
    keys = {**decoder_metadata(dense, output.form), **output.metadata(conversion)}
    plan = _tensors(conversion, output)
    with complete_folder(out) as folder:
        written = write_and_read_back(folder, dense, layout, output.form, keys, plan, config)
        check_moe_values(GgufFile(written.path), conversion, output)
        exact = output.exponent is not None
        return put_on_record(
            written,
            name=out.name,
            format_name=output.name,
            run=run_where_possible(
                written,
                token_ids,
                exact_gates=exact,
                most_active=most_active_experts(
                    len(plan), layout.num_layers, len(layout.moe_layers)
                ),
            ),
            routers=routers,
            notes=output.notes(layout),
        )


def _tensors(conversion: Conversion, output: GgufArchitecture) -> list[GgufTensor]:
    dense, tensors = conversion.dense, conversion.tensors
    plan = outer_tensors(dense, tensors, output.form)
    for layer in range(dense.widths.layers):
        plan += layer_tensors(dense, tensors, output.form, layer)
        if layer in conversion.layout.moe_layers:
            plan += output.moe_tensors(conversion, layer)
        else:
            plan += dense_ffn_tensors(dense, tensors, layer)
    return plan
