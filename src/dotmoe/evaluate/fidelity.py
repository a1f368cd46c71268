"""How close a model stays to its dense model: hidden states, logits, and FFN by FFN."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dotmoe.errors import UserError
from dotmoe.evaluate.head_chunks import chunks, hidden_states, logits


@dataclass(frozen=True, kw_only=True, slots=True)
class Closeness:
    """Two sequences of vectors compared, the second being the dense model's."""

    cosine: float
    """Cosine similarity of each token's two vectors, mean over tokens."""
    mse: float
    """Squared difference, mean over tokens and entries."""
    relative_mse: float
    """The same over the mean square of the dense model's entries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityResult:
    """A model beside its dense model on the same tokens."""

    before_head: Closeness
    """Of hidden states after the last norm, which the LM head reads ("pre-LM")."""
    after_head: Closeness
    """Of logits ("post-LM")."""
    kl: float
    """KL(dense || model) of the predictions, nats a token."""
    top1_agreement: float
    """Share of tokens with the same most likely next token."""
    ffn: dict[int, Closeness]
    """Of each split FFN's output, both being fed the dense model's input; by layer."""
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, layers as a list."""
        layers = [{"layer": layer, **asdict(value)} for layer, value in self.ffn.items()]
        mean = sum(value.mse for value in self.ffn.values()) / max(1, len(self.ffn))
        return asdict(self) | {"ffn": layers, "mean_ffn_mse": mean if layers else None}


class _Sums:
    """Running sums of a `Closeness`, in float64."""

    def __init__(self) -> None:
        self.cosine = self.squares = self.size = 0.0
        self.tokens = self.entries = 0

    def add(self, actual_TD: Tensor, dense_TD: Tensor) -> None:
        """Take in some tokens."""
        actual_TD, dense_TD = actual_TD.float(), dense_TD.float()
        self.cosine += float(F.cosine_similarity(actual_TD, dense_TD, dim=1).double().sum())
        self.squares += float((actual_TD - dense_TD).square().sum(dim=1).double().sum())
        self.size += float(dense_TD.square().sum(dim=1).double().sum())
        self.tokens += len(dense_TD)
        self.entries += dense_TD.numel()

    def closeness(self) -> Closeness:
        """What they come to."""
        return Closeness(
            cosine=self.cosine / self.tokens,
            mse=self.squares / self.entries,
            relative_mse=self.squares / self.size,
        )


@torch.no_grad()
def fidelity(
    dense: Any,
    model: Any,
    tokens: Tensor,
    window: int,
    *,
    ffns: Mapping[int, tuple[nn.Module, Callable[[Tensor], Tensor]]],
    batch_size: int = 8,
    on_progress: Callable[[int, int], None] | None = None,
) -> FidelityResult:
    """Compare a model with its dense model, both run on the same windows of tokens.

    tab:output_aware_similarity is `before_head` and `after_head`, tab:motivation_mse_combined the
    `mse` of one layer's `ffn`. Memory is both models, one batch of hidden states, and one chunk of
    logits of each (`head_chunks.CHUNK_LOGITS`).

    Args:
        dense: The dense model, a causal language model of Transformers.
        model: The other, with the same vocabulary and width.
        tokens: Token ids, one dimension; those that do not fill a window are left out, unless all
            are fewer than one window.
        window: Tokens of a window, 1 to the context; windows do not see each other.
        ffns: For each split layer the dense model's FFN, and what maps the same input [B, T, D] to
            the other model's FFN output. Empty: no layers are compared.
        batch_size: Windows at once.
        on_progress: Told windows done and windows in all.

    Raises:
        UserError: Another vocabulary or width.
    """
    _require_alike(dense, model)
    window = min(window, tokens.numel())
    num_windows = tokens.numel() // window
    rows = tokens[: num_windows * window].view(num_windows, window)
    before, after, by_layer = _Sums(), _Sums(), {layer: _Sums() for layer in ffns}
    kl, same = 0.0, 0
    vocabulary = int(dense.config.vocab_size)
    for start in range(0, num_windows, batch_size):
        batch = rows[start : start + batch_size]
        with _comparing(ffns, by_layer):
            dense_TD = hidden_states(dense, batch).flatten(0, 1)
        actual_TD = hidden_states(model, batch).flatten(0, 1).to(dense_TD.device)
        before.add(actual_TD, dense_TD)
        for part in chunks(len(dense_TD), vocabulary):
            dense_TV, actual_TV = logits(dense, dense_TD[part]), logits(model, actual_TD[part])
            after.add(actual_TV, dense_TV)
            same += int((actual_TV.argmax(dim=1) == dense_TV.argmax(dim=1)).sum())
            kl += _summed_kl(dense_TV, actual_TV)
        if on_progress is not None:
            on_progress(min(start + batch_size, num_windows), num_windows)
    return FidelityResult(
        before_head=before.closeness(),
        after_head=after.closeness(),
        kl=kl / before.tokens,
        top1_agreement=same / before.tokens,
        ffn={layer: sums.closeness() for layer, sums in by_layer.items()},
        tokens=before.tokens,
    )


def _summed_kl(dense_TV: Tensor, actual_TV: Tensor) -> float:
    dense_log, actual_log = dense_TV.log_softmax(dim=1), actual_TV.log_softmax(dim=1)
    kl_TV = F.kl_div(actual_log, dense_log, log_target=True, reduction="none")
    return float(kl_TV.sum(dim=1).double().sum())


@contextmanager
def _comparing(
    ffns: Mapping[int, tuple[nn.Module, Callable[[Tensor], Tensor]]], sums: Mapping[int, _Sums]
) -> Iterator[None]:
    """Inside, whatever a dense FFN is fed goes through the other model's too."""

    def compare(layer: int, other: Callable[[Tensor], Tensor]) -> Any:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            sums[layer].add(other(arguments[0]).flatten(0, 1), output.flatten(0, 1))

        return hook

    hooks = [
        ffn.register_forward_hook(compare(layer, other)) for layer, (ffn, other) in ffns.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _require_alike(dense: Any, model: Any) -> None:
    for key in ("vocab_size", "hidden_size"):
        ours, theirs = getattr(model.config, key), getattr(dense.config, key)
        if ours != theirs:
            raise UserError(
                f"{key} is {ours} in the model and {theirs} in the one to compare it with, so one "
                "was not made from the other. Name the dense model with --against."
            )
