"""Write GGUF files, the container of llama.cpp, tensor by tensor; compare and run them."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, quants
from jaxtyping import Int
from torch import Tensor

from dotmoe.common.errors import UserError, VerificationError
from dotmoe.common.files import require_finite, require_free
from dotmoe.common.progress import Update, no_update
from dotmoe.export import llama_cpp
from dotmoe.export.format import ConvertedModel, Format, TensorSpec
from dotmoe.export.routers import exceeded_limits
from dotmoe.export.verify import logits_error, logits_of, top1_agreement
from dotmoe.method.layout import splits_in
from dotmoe.method.masked import masked_by
from dotmoe.models.from_gguf import GgufFile
from dotmoe.models.on_disk import on_disk
from dotmoe.models.tokenizer import PROBES

_KINDS = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
    list: GGUFValueType.ARRAY,
}
DENSE_ERROR, GATES_ERROR = 1e-4, 5e-3
"""Largest accepted logits error in float32, without experts and with gates that are nearly 1."""
STORED_ERROR = {"f32": 0.0, "f16": 1e-2, "bf16": 5e-2, "q8_0": 0.1, "q4_0": 0.6}
"""What each number format adds to that limit without routing; 4 bits added 0.3 when measured."""
ROUTED_ERROR = 0.5
"""Largest accepted logits error if rounding decides near-ties for the k-th expert; a wrong
computation gives 0.8 or more."""
_REPORT = "Report this as a bug in dotmoe."


def write_gguf(
    path: Path,
    arch: str,
    keys: dict[str, Any],
    specs: Sequence[TensorSpec],
    on_progress: Update = no_update,
) -> None:
    """Write a GGUF file with at most one tensor in memory.

    `arch` is `general.architecture`, `keys` are all other keys; integers become uint32, in lists
    int32. A weight that does not fit into its number format is refused.
    """
    require_free(path.parent, sum(spec.num_bytes for spec in specs))
    with closing(GGUFWriter(path, arch)) as writer:
        for key, value in keys.items():
            writer.add_key_value(key, value, _KINDS[type(value)])
        for spec in specs:
            writer.add_tensor_info(
                spec.name,
                spec.shape,
                np.dtype(np.float32),
                spec.num_bytes,
                raw_dtype=GGMLQuantizationType[spec.stored],
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, spec in enumerate(specs):
            tensor = spec.make()
            require_finite(spec.name, tensor, path)
            writer.write_tensor_data(encoded(spec, tensor))
            on_progress(done + 1, len(specs), "tensors written")


def encoded(spec: TensorSpec, tensor: Tensor) -> np.ndarray:
    """The tensor in the number format of its spec; refuses values that float16 cannot hold."""
    values = tensor.float().contiguous().numpy()
    assert values.shape == spec.shape, f"{spec.name} is {values.shape}"
    if spec.stored == "F16":
        largest = np.abs(values).max()
        if largest > np.finfo(np.float16).max:
            raise UserError(
                f"{spec.name} cannot be stored as F16: {largest:g} does not fit into float16. "
                "Choose --gguf-type bf16 or f32."
            )
    stored: np.ndarray = quants.quantize(values, GGMLQuantizationType[spec.stored])
    return stored


def check_gguf(
    form: Format, converted: ConvertedModel, folder: Path, tokens_BT: Int[Tensor, "B T"]
) -> tuple[dict[str, Any], list[str]]:
    """Compare every key and byte of a file, and run it if llama-cpp-python is installed.

    Needs memory for a few dense tensors; a run, for the file and one decoder layer in float32.

    Returns:
        `tensors`, their number; `storing_error`, the largest root mean square (RMS) error of a
        tensor relative to its RMS; `run`, see `_run`, None if not run. And a sentence for each
        exceeded limit. A different key, byte or tokenised text raises a `VerificationError`.
    """
    (path,) = folder.glob("*.gguf")
    file = GgufFile(path)
    specs = {spec.name: spec for spec in form.tensors(converted)}
    _require_keys(file, form.header(converted))
    storing_error = _require_tensors(file, specs)
    converted.tensors.forget()
    run = _run(form, converted, file, tokens_BT) if llama_cpp.is_installed() else None
    problems = [] if run is None else _problems(run, form, converted.config.gguf_type)
    return {"tensors": len(specs), "storing_error": storing_error, "run": run}, problems


def _require_keys(file: GgufFile, header: Mapping[str, Any]) -> None:
    """Refuse a file whose keys are not those that were written, as GGUF stores them."""
    for key in sorted((file.keys | header.keys()) - {"general.architecture"}):
        wanted = header.get(key)
        if isinstance(wanted, float):
            wanted = float(np.float32(wanted))
        value = file.metadata(key)
        if value != wanted:
            difference = f"{str(value)[:40]!r} instead of {str(wanted)[:40]!r}"
            raise VerificationError(f"{key} in {file.path} is {difference}. {_REPORT}")


def _require_tensors(file: GgufFile, specs: Mapping[str, TensorSpec]) -> float:
    """Refuse a file whose tensors are not those that were written, byte by byte.

    Returns the largest RMS error that storing made in a tensor, relative to its RMS.
    """
    if different := file.tensors.keys() ^ specs.keys():
        name = min(different)
        raise VerificationError(f"{name} in {file.path} is missing or unexpected. {_REPORT}")
    worst = 0.0
    for name, spec in specs.items():
        exact = spec.make().float()
        if encoded(spec, exact).tobytes() != file.tensors[name].data.tobytes():
            raise VerificationError(f"{name} in {file.path} is not what was written. {_REPORT}")
        error, size = (float(x.square().mean().sqrt()) for x in (file.tensor(name) - exact, exact))
        if size:
            worst = max(worst, error / size)
    return worst


@torch.no_grad()
def _run(
    form: Format, converted: ConvertedModel, file: GgufFile, tokens_BT: Int[Tensor, "B T"]
) -> dict[str, Any]:
    """Compare llama.cpp with float32 Transformers on the dense weights, each with its own routing.

    Errors are medians of a token's mean |logit difference|, in standard deviations of all logits.
    """
    dense, layout = converted.dense, converted.layout

    def run(path: Path) -> tuple[Tensor, str, int]:
        with llama_cpp.LlamaCppModel(path, context=tokens_BT.shape[1]) as model:
            logits_TV = torch.cat([model.logits(row) for row in tokens_BT.cpu()])
            return logits_TV, model.ask("version"), _compare_tokens(model, file, dense.tokenizer)

    actual_TV, version, texts = run(file.path)
    twin = on_disk(dense, dense.device, torch.float32)
    all_experts_error = None
    dense_TV = logits_of(twin.model, tokens_BT)
    expected_TV = dense_TV
    if form.has_experts:
        with masked_by(twin, layout):
            expected_TV = logits_of(twin.model, tokens_BT)
        whole = replace(layout, active_experts=layout.num_experts)
        at_full = replace(converted, layouts=(whole,), on_progress=no_update)
        # llama.cpp may have no room for all experts.
        refusal = form.unsupported(dense, splits_in(at_full.layouts), converted.dtype)
        if refusal is None and not layout.granularity.dropped_size:
            with TemporaryDirectory(dir=file.path.parent) as folder:
                (name,) = form.write(at_full, Path(folder))
                logits_TV, _, _ = run(Path(folder, name))
            all_experts_error = float(logits_error(logits_TV, dense_TV).median())
    return {
        "runtime": version,
        "tokens": tokens_BT.numel(),
        "logits_error": float(logits_error(actual_TV, expected_TV).median()),
        "top1_agreement": top1_agreement(actual_TV, expected_TV),
        "all_experts_error": all_experts_error,
        "tokenized_texts": texts,
    }


def _compare_tokens(model: llama_cpp.LlamaCppModel, file: GgufFile, stock: Any) -> int:
    """Number of texts that both tokenise alike; a difference raises a `VerificationError`."""
    kind = file.metadata("tokenizer.ggml.model")
    if kind == "none":
        return 0
    for probe in PROBES:
        # SentencePiece may put a space before a text that begins with one; Transformers may not.
        text = probe.lstrip() if kind == "llama" else probe
        expected, actual = list(stock(text)["input_ids"]), model.tokenize(text)
        if actual != expected:
            raise VerificationError(
                f"llama.cpp tokenises {text[:24]!r} into {actual[:12]}, but Transformers into "
                f"{expected[:12]}. Export with --gguf-tokenizer none, and report a bug."
            )
    return len(PROBES)


def _problems(run: dict[str, Any], form: Format, gguf_type: str) -> list[str]:
    limit = (GATES_ERROR if form.has_experts else DENSE_ERROR) + STORED_ERROR[gguf_type]
    limit_of_routed = limit
    ranks_logits = form.gating.score == "softmax_of_chosen"
    if form.has_experts and not (ranks_logits and gguf_type == "f32"):
        # Rounding may choose other experts.
        limit_of_routed = max(limit, ROUTED_ERROR)
    metrics = [
        ("masked dense model", run["logits_error"], limit_of_routed),
        ("dense model, all experts on", run["all_experts_error"] or 0.0, limit),
    ]
    what = "llama.cpp computes something else: median logit error against the"
    return [f"{what} {problem}" for problem in exceeded_limits(metrics)]
