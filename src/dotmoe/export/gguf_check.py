"""A written GGUF: every key and byte compared, and run in llama.cpp beside the dense checkpoint."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from dotmoe import llama_cpp
from dotmoe.checkpoint.on_disk import on_disk
from dotmoe.errors import UserError, VerificationError
from dotmoe.export.format import Conversion
from dotmoe.export.gguf_file import GgufFile, encoded, write_with_active_experts
from dotmoe.export.verify import logits_error, logits_of, top1_agreement
from dotmoe.moe.masked import masked_by

if TYPE_CHECKING:
    from dotmoe.export.gguf_format import GgufFormat

EXACT_GATES_ERROR, SOFTMAX_GATES_ERROR = 1e-4, 5e-3
"""Largest logits error in float32, of exactly binary gates and of those after a softmax."""
STORED_ERROR = {"f32": 0.0, "f16": 1e-2, "bf16": 5e-2, "q8_0": 0.1, "q4_0": 0.6}
"""What number formats add to that where nothing is routed; 4 bits were seen to add 0.3."""
ROUTED_ERROR = 0.5
"""Largest logits error where rounding decides at near-ties of the k-th place; another
computation comes to 0.8 and more."""

_REPORT = "Report this as a defect of dotmoe."
PROBES = (
    "Once upon a time, there was a little girl named Lily.",
    "def f(x):\n\treturn x ** 2  # 1234567890, 3.14\n\n\nprint(f(12))  ",
    "  two  spaces,   three;\n \n trailing \t tab",
    "Grüße, café, naïve — “quotes” … 日本語 中文 한국어 Привет мир 🙂🚀 ½ ² ٣",
    "I'm, you're, he'LL, don't; WE'VE 'tis 100,000.00 x=1e-5 {}[]()<>@#$%^&*",
)
"""Texts on which the tokenizers are compared: letters of many scripts, digits, spaces, lines."""


def check_gguf(
    form: "GgufFormat", conversion: Conversion, folder: Path, tokens_BT: Int[Tensor, "B T"]
) -> tuple[dict[str, Any], list[str]]:
    """Read a file back, and run it where llama-cpp-python is installed.

    Needs memory for a few dense tensors; running, for the file and one decoder layer in float32.

    Args:
        form: Its format.
        conversion: What was exported.
        folder: Where it lies.
        tokens_BT: Real text, rows no longer than the context.

    Returns:
        `tensors`, their number; `storing_error`, the largest root mean square error of one in root
        mean squares of it; `run`, see `_run`, None where it was not run. And a sentence for each
        limit exceeded.

    Raises:
        VerificationError: A key or value is not what was to be written, or a text is cut otherwise.
    """
    (path,) = folder.glob("*.gguf")
    file = GgufFile(path)
    specs = {spec.name: spec for spec in form.tensors(conversion)}
    header, worst = form.header(conversion), 0.0
    for key in sorted((file.keys | header.keys()) - {"general.architecture"}):
        wanted, value = header.get(key), file.metadata(key)
        if value != (float(np.float32(wanted)) if isinstance(wanted, float) else wanted):
            raise VerificationError(
                f"{key} in {path} is {str(value)[:40]!r} instead of {str(wanted)[:40]!r}. {_REPORT}"
            )
    for name in sorted(file.tensors.keys() ^ specs.keys()):
        raise VerificationError(f"{name} in {path} is missing or too much there. {_REPORT}")
    for name, spec in specs.items():
        exact = spec.make().float()
        if encoded(spec, exact).tobytes() != file.tensors[name].data.tobytes():
            raise VerificationError(f"{name} in {path} is not what was written. {_REPORT}")
        error, size = (float(x.square().mean().sqrt()) for x in (file.tensor(name) - exact, exact))
        worst = max(worst, error / size if size else 0.0)
    conversion.tensors.forget()
    found: dict[str, Any] = {"tensors": len(specs), "storing_error": worst, "run": None}
    if not llama_cpp.is_installed():
        return found, []
    run = _run(form, conversion, file, tokens_BT)
    return found | {"run": run}, _problems(run, path.name, form, conversion.config.gguf_type)


@torch.no_grad()
def _run(
    form: "GgufFormat", conversion: Conversion, file: GgufFile, tokens_BT: Int[Tensor, "B T"]
) -> dict[str, Any]:
    """llama.cpp beside float32 Transformers with the weights as stored, each routing for itself.

    Errors are mean |differences| of a token's logits, in standard deviations of all logits. The
    largest one shows a near-tie that falls the other way.
    """
    dense, layout, rows = conversion.dense, conversion.layout, tokens_BT.cpu()
    with llama_cpp.LlamaCppModel(file.path, context=tokens_BT.shape[1]) as model:
        version = model.ask("version")
        actual_TV = torch.cat([model.logits(row) for row in rows])
        texts = _check_tokenizer(model, file, dense.tokenizer)
    twin = on_disk(dense, dense.device, torch.float32)
    expected_TV = dense_TV = logits_of(twin.model, tokens_BT)
    all_experts_error = None
    if form.splits:
        with masked_by(twin, layout):
            expected_TV = logits_of(twin.model, tokens_BT)
    if form.splits and not layout.dropped_size:
        copy = file.path.with_name(".all_experts.gguf")
        try:
            with suppress(UserError):  # llama.cpp has no room for so many experts
                write_with_active_experts(file.path, layout.num_experts, copy)
                with llama_cpp.LlamaCppModel(copy, context=tokens_BT.shape[1]) as model:
                    all_on_TV = torch.cat([model.logits(row) for row in rows])
                all_experts_error = float(logits_error(all_on_TV, dense_TV).median())
        finally:
            copy.unlink(missing_ok=True)
    error_T = logits_error(actual_TV, expected_TV)
    return {
        "runtime": version,
        "tokens": tokens_BT.numel(),
        "logits_error": float(error_T.median()),
        "largest_error": float(error_T.max()),
        "top1_agreement": top1_agreement(actual_TV, expected_TV),
        "all_experts_error": all_experts_error,
        "tokenized_texts": texts,
    }


def _check_tokenizer(model: llama_cpp.LlamaCppModel, file: GgufFile, stock: Any) -> int:
    kind = file.metadata("tokenizer.ggml.model")
    if kind == "none":
        return 0
    for probe in PROBES:
        # SentencePiece may put a space before a text that begins with one; Transformers may not.
        text = probe.lstrip() if kind == "llama" else probe
        expected, found = list(stock(text)["input_ids"]), model.tokenize(text)
        if found != expected:
            raise VerificationError(
                f"llama.cpp tokenises {text[:24]!r} into {found[:12]}, but Transformers into "
                f"{expected[:12]}. Export with --gguf-tokenizer none, and report this."
            )
    return len(PROBES)


def _problems(run: dict[str, Any], name: str, form: "GgufFormat", gguf_type: str) -> list[str]:
    is_exact = form.exponent is not None or not form.splits
    limit = (EXACT_GATES_ERROR if is_exact else SOFTMAX_GATES_ERROR) + STORED_ERROR[gguf_type]
    is_routed = form.splits and not (is_exact and gguf_type == "f32")
    figures = [
        ("masked dense model", run["logits_error"], max(limit, ROUTED_ERROR * is_routed)),
        ("dense model, all experts on,", run["all_experts_error"] or 0.0, limit),
    ]
    return [
        f"llama.cpp runs {name} otherwise than the {what} is computed: logits of the median "
        f"token differ by {value:.3g} standard deviations, limit {most:.3g}."
        for what, value, most in figures
        if not value <= most  # so that NaN fails too
    ]
