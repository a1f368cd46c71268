"""A written GGUF beside the dense checkpoint: every key and value, and run in llama.cpp.

The dense tensors are rebuilt from the file by the way back, not by repeating the way there: experts
are put back neuron by neuron, heads are put back by halves.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe import llama_cpp
from dotmoe.checkpoint.on_disk import on_disk
from dotmoe.checkpoint.tensors import EMBEDDING, HEAD, NORM, Tensors
from dotmoe.errors import VerificationError
from dotmoe.export.format import Conversion
from dotmoe.export.gguf_file import GgufFile
from dotmoe.export.gguf_record import GgufVerification, RunCheck
from dotmoe.export.rope import halves_order
from dotmoe.export.tensors import PROJECTIONS, carried_names
from dotmoe.export.tokenizer import TokenizerKeys
from dotmoe.export.verify import logits_error, logits_of, top1_agreement
from dotmoe.layout import ALWAYS_ON
from dotmoe.models.dense import DenseModel
from dotmoe.moe.masked import masked_by
from dotmoe.worker import WorkerDiedError

if TYPE_CHECKING:
    from dotmoe.export.gguf_format import GgufFormat

EXACT_GATES_ERROR, SOFTMAX_GATES_ERROR = 1e-4, 5e-3
"""Largest logits error in float32, of exactly binary gates and of those after a softmax."""
ARITHMETIC_ERROR = {"f32": 0.0, "f16": 1e-2, "bf16": 5e-2, "q8_0": 5e-2, "q4_0": 5e-2}
"""What comes to that where nothing is routed: llama.cpp rounds activations to 8 to 11 bits."""
ROUTED_ERROR = 0.5
"""Largest logits error where rounding decides at near-ties of the k-th place; another computation
comes to 0.8 and more."""

PROBES = (
    "Once upon a time, there was a little girl named Lily.",
    "def f(x):\n\treturn x ** 2  # 1234567890, 3.14\n\n\nprint(f(12))  ",
    "  two  spaces,   three;\n \n trailing \t tab",
    "Grüße, café, naïve — “quotes” … 日本語 中文 한국어 Привет мир 🙂🚀 ½ ² ٣",
    "I'm, you're, he'LL, don't; WE'VE 'tis 100,000.00 x=1e-5 {}[]()<>@#$%^&*",
)
"""Texts on which the tokenizers are compared: letters of many scripts, digits, spaces, lines."""

Read = Callable[[str], Tensor]
"""A tensor of a file by its GGUF name: its values, or how far off they may be."""


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
    stored = _StoredWeights(form, conversion, GgufFile(path))
    _check_keys(stored.file, {"general.architecture": stored.file.arch, **form.header(conversion)})
    tensors = _check_constants(form, conversion, stored.file)
    storing_error = _check_dense_values(stored)
    run, problems = None, []
    if llama_cpp.is_installed():
        run = _run(stored, tokens_BT, tokenizer)
        problems = _problems(run, path, form, conversion.gguf.type)
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


def _check_constants(form: "GgufFormat", conversion: Conversion, file: GgufFile) -> int:
    """Compare all float32 tensors and shared experts with what was to be written; how many are
    there.
    """
    expected = {spec.name: spec for spec in form.tensors(conversion)}
    for name in sorted(file.names ^ set(expected)):
        raise VerificationError(f"{name} in {file.path} is missing or too much there.")
    for name, spec in expected.items():
        if spec.stored == "F32" or "shexp" in name:
            error = (file.tensor(name) - spec.make().float()).abs()
            if not bool((error <= file.tolerance(name)).all()):
                raise VerificationError(
                    f"{name} in {file.path} is not what was written. Report this as a defect of "
                    "dotmoe."
                )
    return len(expected)


def _check_dense_values(stored: "_StoredWeights") -> float:
    """Compare every dense weight with what the file holds of it; largest relative error."""
    worst, tensors = 0.0, stored.conversion.tensors
    for name in dense_names(stored.conversion.dense):
        exact = tensors.read(name).float()
        error = (stored.rebuilt(name, stored.file.tensor) - exact).abs()
        if not bool((error <= stored.rebuilt(name, stored.file.tolerance)).all()):
            raise VerificationError(
                f"{name} came back from {stored.file.path} up to {float(error.max()):g} off, more "
                "than its number format explains. Report this as a defect of dotmoe."
            )
        size = float(exact.square().mean().sqrt())
        worst = max(worst, float(error.square().mean().sqrt()) / size if size else 0.0)
    tensors.forget()
    return worst


def dense_names(dense: DenseModel) -> Iterator[str]:
    """Names of all tensors of a dense model, in LLaMA's form."""
    yield from (EMBEDDING, NORM)
    if not dense.config.tie_word_embeddings:
        yield HEAD
    for layer in range(dense.widths.layers):
        yield from carried_names(dense, layer)
        yield from (dense.family.ffn_tensor(layer, name) for name in PROJECTIONS)


class _StoredWeights(Tensors):
    """The dense model's tensors as a file holds them."""

    def __init__(self, form: "GgufFormat", conversion: Conversion, file: GgufFile) -> None:
        self.form, self.conversion, self.file = form, conversion, file
        dense = conversion.dense
        super().__init__(dense.folder, tied=bool(dense.config.tie_word_embeddings))
        self._parts: dict[str, list[tuple[int, str]]] = {}
        for name in dense_names(dense):
            part = dense.family.stored(dense.config, name)
            first = 0 if part.rows is None else part.rows[0]
            self._parts.setdefault(part.stored, []).append((first, name))
        if dense.config.tie_word_embeddings:
            self._parts[HEAD] = self._parts[EMBEDDING]

    def read(self, name: str) -> Tensor:
        """A tensor by its name in the dense checkpoint, float32."""
        parts = sorted(self._parts[name])
        return torch.cat([self.rebuilt(part, self.file.tensor) for _, part in parts])

    def rebuilt(self, name: str, read: Read) -> Tensor:
        """A dense tensor by its name in LLaMA's form."""
        dense, form = self.conversion.dense, self.form
        if ".mlp." in name:
            return self._rebuilt_ffn(int(name.split(".")[2]), name.split(".")[4][:-5], read)
        tensor, heads = read(form.name_of(dense, name)), form.rotated_heads(dense, name)
        head_dim = dense.family.traits(dense.config).head_dim
        return halves_order(tensor, heads, head_dim) if heads else tensor

    def _rebuilt_ffn(self, layer: int, projection: str, read: Read) -> Tensor:
        prefix, layout = f"blk.{layer}.ffn_{projection}", self.conversion.layout
        if f"{prefix}.weight" in self.file.names:
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


@torch.no_grad()
def _run(
    stored: _StoredWeights, tokens_BT: Int[Tensor, "B T"], tokenizer: TokenizerKeys
) -> RunCheck:
    """Compare logits at the file's own k and at k = E, and the tokenizer on probes."""
    conversion, path = stored.conversion, stored.file.path
    dense, layout = conversion.dense, conversion.layout
    with llama_cpp.LlamaCppModel(path, context=tokens_BT.shape[1]) as runtime:
        version, actual_TV = runtime.version, _logits(runtime, tokens_BT)
        tokenized = 0
        if tokenizer.name != "none":
            tokenized = _check_tokenizer(runtime, dense.tokenizer, tokenizer)
    twin = on_disk(dense, dense.device, torch.float32, tensors=stored)
    all_experts = None
    if stored.form.splits:
        with masked_by(twin, layout):
            stored_TV = logits_of(twin.model, tokens_BT)
        all_on_TV = _with_all_experts(stored, tokens_BT)
        if all_on_TV is not None:
            error_T = logits_error(all_on_TV, logits_of(twin.model, tokens_BT))
            all_experts = float(error_T.median())
    else:
        stored_TV = logits_of(twin.model, tokens_BT)
    error_T = logits_error(actual_TV, stored_TV)
    return RunCheck(
        runtime=version,
        tokens=tokens_BT.numel(),
        logits_error=float(error_T.median()),
        largest_error=float(error_T.max()),
        top1_agreement=top1_agreement(actual_TV, stored_TV),
        all_experts_error=all_experts,
        tokenized_texts=tokenized,
    )


def _problems(run: RunCheck, path: Path, form: "GgufFormat", gguf_type: str) -> list[str]:
    is_exact = form.exponent is not None or not form.splits
    limit = EXACT_GATES_ERROR if is_exact else SOFTMAX_GATES_ERROR
    limit += ARITHMETIC_ERROR[gguf_type]
    is_routed = form.splits and not (is_exact and gguf_type == "f32")
    figures = {
        "masked dense model": (run.logits_error, ROUTED_ERROR if is_routed else limit),
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


def _with_all_experts(stored: _StoredWeights, tokens_BT: Tensor) -> Float[Tensor, "T V"] | None:
    """Logits at k = E, from a copy of the file; None where llama.cpp cannot run so many."""
    from dotmoe.export.gguf_format import write_with_active_experts

    file, experts = stored.file, stored.conversion.layout.num_experts
    layers, split = stored.conversion.layout.num_layers, len(stored.conversion.layout.moe_layers)
    if experts > llama_cpp.most_active_experts(len(file.names), layers, split):
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
