"""What was found of a written GGUF; no GGUF package is needed to read it."""

from dataclasses import dataclass


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
    all_experts_error: float | None
    """Of the median token at k = E, against the dense model; None for a dense file, and where
    llama.cpp cannot run that many experts."""
    tokenized_texts: int
    """Probe texts that llama.cpp tokenises as Transformers does; any other is an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufVerification:
    """What was compared after writing."""

    tensors: int
    """Tensors read back, each value compared with the dense checkpoint's or the layout's."""
    storing_error: float
    """Largest root mean square error of a tensor, in root mean squares of the tensor; 0 for f32."""
    run: RunCheck | None
    """The file run in llama.cpp; None where llama-cpp-python is not installed."""
