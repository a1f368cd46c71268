"""A written GGUF: every key and byte compared, and run in llama.cpp beside the dense checkpoint."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe import llama_cpp
from dotmoe.checkpoint.on_disk import on_disk
from dotmoe.errors import VerificationError
from dotmoe.export.format import Conversion
from dotmoe.export.gguf_file import GgufFile, encoded
from dotmoe.export.gguf_record import GgufVerification, RunCheck
from dotmoe.export.tokenizer import TokenizerKeys
from dotmoe.export.verify import logits_error, logits_of, top1_agreement
from dotmoe.layout import ExpertLayout
from dotmoe.moe.masked import masked_by
from dotmoe.worker import WorkerDiedError

if TYPE_CHECKING:
    from dotmoe.export.gguf_format import GgufFormat

EXACT_GATES_ERROR, SOFTMAX_GATES_ERROR = 1e-4, 5e-3
"""Largest logits error in float32, of exactly binary gates and of those after a softmax."""
STORED_ERROR = {"f32": 0.0, "f16": 1e-2, "bf16": 5e-2, "q8_0": 0.1, "q4_0": 0.6}
"""What number formats add to that where nothing is routed; 4 bits were seen to add 0.3."""
ROUTED_ERROR = 0.5
"""Largest logits error where rounding decides at near-ties of the k-th place; another
computation comes to 0.8 and more."""

PROBES = (
    "Once upon a time, there was a little girl named Lily.",
    "def f(x):\n\treturn x ** 2  # 1234567890, 3.14\n\n\nprint(f(12))  ",
    "  two  spaces,   three;\n \n trailing \t tab",
    "Grüße, café, naïve — “quotes” … 日本語 中文 한국어 Привет мир 🙂🚀 ½ ² ٣",
    "I'm, you're, he'LL, don't; WE'VE 'tis 100,000.00 x=1e-5 {}[]()<>@#$%^&*",
)
"""Texts on which the tokenizers are compared: letters of many scripts, digits, spaces, lines."""


def check_gguf(
    form: "GgufFormat",
    conversion: Conversion,
    folder: Path,
    tokens_BT: Int[Tensor, "B T"],
    tokenizer: TokenizerKeys,
) -> tuple[GgufVerification, list[str]]:
    """Read a file back, and run it where llama-cpp-python is installed.

    Needs memory for a few dense tensors; running, for the file and one decoder layer in float32.

    Args:
        form: Its format.
        conversion: What was exported.
        folder: Where it lies.
        tokens_BT: Real text, rows no longer than the context.
        tokenizer: The file's.

    Returns:
        All figures, and a sentence for each limit exceeded.

    Raises:
        VerificationError: A key or value is not what was to be written, or a text is cut otherwise.
    """
    (path,) = folder.glob("*.gguf")
    file = GgufFile(path)
    _check_keys(file, {"general.architecture": file.arch, **form.header(conversion)})
    storing_error = _check_tensors(form, conversion, file)
    run, problems = None, []
    if llama_cpp.is_installed():
        run = _run(form, conversion, file, tokens_BT, tokenizer)
        problems = _problems(run, path, form, conversion.gguf.type)
    tensors = len(file.names)
    return GgufVerification(tensors=tensors, storing_error=storing_error, run=run), problems


def _check_keys(file: GgufFile, wanted: dict[str, Any]) -> None:
    for key in sorted(file.keys | set(wanted)):
        found, value = file.metadata(key), wanted.get(key)
        if isinstance(value, float):
            value = float(np.float32(value))
        if found != value:
            raise VerificationError(
                f"{key} in {file.path} is {str(found)[:40]!r} instead of {str(value)[:40]!r}. "
                "Report this as a defect of dotmoe."
            )


def _check_tensors(form: "GgufFormat", conversion: Conversion, file: GgufFile) -> float:
    """Compare every tensor with what was to be written; the largest relative error of storing."""
    expected = {spec.name: spec for spec in form.tensors(conversion)}
    for name in sorted(file.names ^ set(expected)):
        raise VerificationError(f"{name} in {file.path} is missing or too much there.")
    worst = 0.0
    for name, spec in expected.items():
        exact = spec.make().float()
        wanted, found = encoded(spec, exact), file.raw(name)
        if wanted.tobytes() != found.tobytes():
            raise VerificationError(
                f"{name} in {file.path} is not what was written. Report this as a defect of dotmoe."
            )
        error, size = (float(x.square().mean().sqrt()) for x in (file.tensor(name) - exact, exact))
        worst = max(worst, error / size if size else 0.0)
    conversion.tensors.forget()
    return worst


@torch.no_grad()
def _run(
    form: "GgufFormat",
    conversion: Conversion,
    file: GgufFile,
    tokens_BT: Int[Tensor, "B T"],
    tokenizer: TokenizerKeys,
) -> RunCheck:
    """Compare logits at the file's own k and at k = E, and the tokenizer on probes."""
    dense, layout = conversion.dense, conversion.layout
    with llama_cpp.LlamaCppModel(file.path, context=tokens_BT.shape[1]) as runtime:
        version, actual_TV = runtime.ask("version"), _logits(runtime, tokens_BT)
        tokenized = 0
        if tokenizer.name != "none":
            tokenized = _check_tokenizer(runtime, dense.tokenizer, tokenizer)
    twin = on_disk(dense, dense.device, torch.float32)
    dense_TV, all_experts = logits_of(twin.model, tokens_BT), None
    expected_TV = dense_TV
    if form.splits:
        with masked_by(twin, layout):
            expected_TV = logits_of(twin.model, tokens_BT)
        all_on_TV = _with_all_experts(file, layout, tokens_BT)
        if all_on_TV is not None:
            all_experts = float(logits_error(all_on_TV, dense_TV).median())
    error_T = logits_error(actual_TV, expected_TV)
    return RunCheck(
        runtime=version,
        tokens=tokens_BT.numel(),
        logits_error=float(error_T.median()),
        largest_error=float(error_T.max()),
        top1_agreement=top1_agreement(actual_TV, expected_TV),
        all_experts_error=all_experts,
        tokenized_texts=tokenized,
    )


def _problems(run: RunCheck, path: Path, form: "GgufFormat", gguf_type: str) -> list[str]:
    is_exact = form.exponent is not None or not form.splits
    limit = EXACT_GATES_ERROR if is_exact else SOFTMAX_GATES_ERROR
    limit += STORED_ERROR[gguf_type]
    is_routed = form.splits and not (is_exact and gguf_type == "f32")
    figures = {
        "masked dense model": (run.logits_error, max(limit, ROUTED_ERROR) if is_routed else limit),
        "dense model, all experts on,": (run.all_experts_error or 0.0, limit),
    }
    return [
        f"llama.cpp runs {path.name} otherwise than the {what} is computed: logits of the median "
        f"token differ by {value:.3g} standard deviations, limit {most:.3g}."
        for what, (value, most) in figures.items()
        if not value <= most  # so that NaN fails too
    ]


def _logits(runtime: llama_cpp.LlamaCppModel, tokens_BT: Tensor) -> Float[Tensor, "T V"]:
    return torch.cat([runtime.logits(row) for row in tokens_BT.cpu()])


def _with_all_experts(
    file: GgufFile, layout: ExpertLayout, tokens_BT: Tensor
) -> Float[Tensor, "T V"] | None:
    """Logits at k = E, from a copy of the file; None where llama.cpp cannot run so many."""
    from dotmoe.export.gguf_format import write_with_active_experts

    experts, split = layout.num_experts, len(layout.moe_layers)
    if experts > llama_cpp.most_active_experts(len(file.names), layout.num_layers, split):
        return None
    changed = file.path.with_name(".all_experts.gguf")
    try:
        write_with_active_experts(file.path, experts, changed)
        with (
            suppress(WorkerDiedError),  # another llama.cpp may have less room
            llama_cpp.LlamaCppModel(changed, context=tokens_BT.shape[1]) as runtime,
        ):
            return _logits(runtime, tokens_BT)
        return None
    finally:
        changed.unlink(missing_ok=True)


def _check_tokenizer(runtime: llama_cpp.LlamaCppModel, stock: Any, tokenizer: TokenizerKeys) -> int:
    for probe in PROBES:
        text = probe.lstrip() if tokenizer.adds_space_always else probe
        expected, found = list(stock(text)["input_ids"]), runtime.tokenize(text)
        if found != expected:
            raise VerificationError(
                f"llama.cpp tokenises {text[:24]!r} into {found[:12]}, but Transformers into "
                f"{expected[:12]}. Export with --gguf-tokenizer none, and report this."
            )
    return len(PROBES)
