"""Run a written file in llama.cpp, where it is installed, beside float32 Transformers."""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.artifacts import DenseModel
from dotmoe.checkpoint.on_disk import empty_model
from dotmoe.checkpoint.tensors import Tensors
from dotmoe.errors import VerificationError
from dotmoe.export.verify import logits_of, top1_agreement
from dotmoe.gguf_export.active_experts import set_active_experts
from dotmoe.gguf_export.decoder import DecoderForm
from dotmoe.gguf_export.gguf_file import GgufFile
from dotmoe.gguf_export.read_back import dense_names, rebuilt
from dotmoe.gguf_export.tokenizer import TokenizerMetadata
from dotmoe.gguf_export.weight_types import WeightType
from dotmoe.layout import ExpertLayout
from dotmoe.llama_cpp import LlamaCppModel
from dotmoe.moe.masked import masked_by
from dotmoe.worker import WorkerDiedError

EXACT_GATES_ERROR, SOFTMAX_GATES_ERROR = 1e-4, 5e-3
"""Largest logits error in float32, of exactly binary gates and of those after a softmax."""

ARITHMETIC_ERROR: dict[WeightType, float] = {
    "f32": 0.0,
    "f16": 1e-2,
    "bf16": 5e-2,
    "q8_0": 5e-2,
    "q4_0": 5e-2,
}
"""What comes to that where nothing is routed: llama.cpp rounds activations to 8 to 11 bits."""

FLOOR_RATIO = 2.5
"""What comes to that where tokens are routed, in errors of the masked model in bfloat16: rounded
activations send some tokens to other experts, and how much that changes depends on the model."""

PROBES = (
    "Once upon a time, there was a little girl named Lily.",
    "def f(x):\n\treturn x ** 2  # 1234567890, 3.14\n\n\nprint(f(12))  ",
    "  two  spaces,   three;\n \n trailing \t tab",
    "Grüße, café, naïve — “quotes” … 日本語 中文 한국어 Привет мир 🙂🚀 ½ ² ٣",
    "I'm, you're, he'LL, don't; WE'VE 'tis 100,000.00 x=1e-5 {}[]()<>@#$%^&*",
)
"""Texts on which the tokenizers are compared: letters of many scripts, digits, spaces, lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCheck:
    """llama.cpp beside float32 Transformers with the weights as stored, each routing for itself.

    Errors are mean |differences| of a token's logits, in standard deviations of all logits.
    """

    runtime: str
    """Version of llama-cpp-python."""
    tokens: int
    logits_error: float
    """Of the median token, against the masked dense model."""
    largest_error: float
    """Of the worst token: a near-tie that falls the other way shows here."""
    top1_agreement: float
    """Share of tokens with the same most likely next token."""
    floor: float
    """`logits_error` of the masked dense model computed in bfloat16."""
    all_experts_error: float | None
    """Of the median token at k = E, against the dense model; None for a dense file, and where
    llama.cpp cannot run that many experts."""
    weights_error: float
    """Mean over tokens of what storing the weights alone changes, without llama.cpp."""
    tokenized_texts: int
    """Probe texts that llama.cpp tokenises as Transformers does; any other is an error."""


@torch.no_grad()
def check_run(
    path: Path,
    dense: DenseModel,
    form: DecoderForm,
    layout: ExpertLayout | None,
    tokens_BT: Int[Tensor, "B T"],
    *,
    weights: WeightType,
    exact_gates: bool,
    most_active: int,
    tokenizer: TokenizerMetadata,
) -> RunCheck:
    """Compare logits on a text, at the file's own k and at k = E, and the tokenizer on probes.

    Needs memory for the file and for a float32 copy of the dense model. The file's k is changed
    for the second run, and changed back.

    Args:
        path: The GGUF.
        dense: The dense model; not changed.
        form: Architecture of the file.
        layout: Split of the FFNs; None: a dense file.
        tokens_BT: The text.
        weights: Number format of the matrices.
        exact_gates: Experts are weighted exactly alike.
        most_active: Largest k that llama.cpp runs; where E is larger, k = E is left out.
        tokenizer: The file's.

    Raises:
        VerificationError: llama.cpp computes or tokenises something else.
    """
    with LlamaCppModel(path, context=tokens_BT.shape[1]) as runtime:
        version, actual_TV = runtime.version, _logits(runtime, tokens_BT)
        tokenized = 0 if tokenizer.model == "none" else _check_tokenizer(runtime, dense, tokenizer)
    twin = _in_memory(dense)
    exact_TV = _reference(twin, layout, tokens_BT)
    _take_weights_of(GgufFile(path), twin, form, layout)
    stored_TV = _reference(twin, layout, tokens_BT)
    all_experts = None
    if layout is not None and layout.num_experts <= most_active:
        with suppress(WorkerDiedError):  # another llama.cpp may have less room than `most_active`
            all_on_TV = _with_all_experts(path, layout, tokens_BT)
            error_T = _token_errors(all_on_TV, _reference(twin, None, tokens_BT))
            all_experts = float(error_T.median())
    for parameter in twin.model.parameters():
        parameter.data = parameter.data.bfloat16()
    rounded_TV = _reference(twin, layout, tokens_BT)
    error_T = _token_errors(actual_TV, stored_TV)
    check = RunCheck(
        runtime=version,
        tokens=tokens_BT.numel(),
        logits_error=float(error_T.median()),
        largest_error=float(error_T.max()),
        top1_agreement=top1_agreement(actual_TV, stored_TV),
        floor=float(_token_errors(rounded_TV, stored_TV).median()),
        all_experts_error=all_experts,
        weights_error=float(_token_errors(stored_TV, exact_TV).mean()),
        tokenized_texts=tokenized,
    )
    _judge(path, check, weights, exact_gates=exact_gates)
    return check


def _in_memory(dense: DenseModel) -> DenseModel:
    """The dense model in float32, with the weights of its files."""
    tensors, model = Tensors.of(dense), empty_model(dense.config, dense.device, torch.float32)
    for name, parameter in model.named_parameters():
        parameter.data = tensors.read(name).to(parameter.device, torch.float32)
    return replace(dense, model=model)


def _judge(path: Path, check: RunCheck, weights: WeightType, *, exact_gates: bool) -> None:
    limit = EXACT_GATES_ERROR if exact_gates else SOFTMAX_GATES_ERROR
    limit += ARITHMETIC_ERROR[weights]
    routed = limit if exact_gates and weights == "f32" else limit + FLOOR_RATIO * check.floor
    figures = {
        "masked dense model": (check.logits_error, routed),
        "dense model, all experts on,": (check.all_experts_error or 0.0, limit),
    }
    for what, (value, most) in figures.items():
        if not value <= most:
            raise VerificationError(
                f"llama.cpp runs {path.name} otherwise than the {what} is computed: logits of the "
                f"median token differ by {value:.3g} standard deviations, limit {most:.3g}. "
                "Report this as a defect of dotmoe."
            )


def _logits(runtime: LlamaCppModel, tokens_BT: Int[Tensor, "B T"]) -> Float[Tensor, "T V"]:
    return torch.cat([runtime.logits(row) for row in tokens_BT.cpu()])


def _with_all_experts(
    path: Path, layout: ExpertLayout, tokens_BT: Int[Tensor, "B T"]
) -> Float[Tensor, "T V"]:
    set_active_experts(path, layout.num_experts)
    try:
        with LlamaCppModel(path, context=tokens_BT.shape[1]) as runtime:
            return _logits(runtime, tokens_BT)
    finally:
        set_active_experts(path, layout.active_experts)


def _token_errors(
    actual_TV: Float[Tensor, "T V"], reference_TV: Float[Tensor, "T V"]
) -> Float[Tensor, " T"]:
    errors: Tensor = (actual_TV - reference_TV).abs().mean(dim=1) / reference_TV.std()
    return errors


def _reference(
    dense: DenseModel, layout: ExpertLayout | None, tokens_BT: Tensor
) -> Float[Tensor, "T V"]:
    tokens = tokens_BT.to(dense.device)
    if layout is None:
        return logits_of(dense.model, tokens)
    with masked_by(dense, layout):
        return logits_of(dense.model, tokens)


def _take_weights_of(
    file: GgufFile, twin: DenseModel, form: DecoderForm, layout: ExpertLayout | None
) -> None:
    """Give a copy of the dense model the weights as the file stores them."""
    parameters = dict(twin.model.named_parameters())
    for name in dense_names(twin):
        part = twin.family.stored(twin.config, name)
        parameter = parameters[part.stored].data
        rows = slice(None) if part.rows is None else slice(*part.rows)
        parameter[rows] = rebuilt(name, file.tensor, twin, form, layout).to(parameter.device)


def _check_tokenizer(
    runtime: LlamaCppModel, dense: DenseModel, tokenizer: TokenizerMetadata
) -> int:
    for probe in PROBES:
        text = probe.lstrip() if tokenizer.adds_space_always else probe
        expected, found = list(dense.tokenizer(text)["input_ids"]), runtime.tokenize(text)
        if found != expected:
            raise VerificationError(
                f"llama.cpp tokenises {text[:24]!r} into {found[:12]}, but Transformers into "
                f"{expected[:12]}. Export with tokenizer none, and report this."
            )
    return len(PROBES)
