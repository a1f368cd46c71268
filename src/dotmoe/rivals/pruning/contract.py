"""The interface of a pruning method, and functions that several methods share."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dotmoe.common.errors import UserError
from dotmoe.common.progress import Update, no_update
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hooks import recomputing
from dotmoe.models.meta_model import num_parameters
from dotmoe.models.stream import TOKENS_AT_ONCE
from dotmoe.models.traits import DecoderTraits


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneInputs:
    """The inputs of every method: the same model, tokens and budget."""

    dense: DenseModel
    """The model, in memory; the method changes it, with gradients off unless it enables them."""
    tokens_BT: Int[Tensor, "B T"]
    """Calibration text, int64."""
    wanted: int
    """Number of parameters to keep active per token, counted as `ParameterCounts.active`."""
    batch: Callable[[int], Int[Tensor, "B T"]]
    """Returns the training text of a step. It, `steps` and `seed` are for methods that train."""
    steps: int = 0
    seed: int = 0
    on_progress: Update = no_update

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers of the model."""
        return self.dense.family.layers(self.dense.model)

    @property
    def excess(self) -> int:
        """Number of parameters to remove."""
        return num_parameters(self.dense.model) - self.wanted


class Pruned(NamedTuple):
    """What a method removed from its model."""

    removed: int
    """Number of parameters removed, by the plan; weights that are zero by chance do not count."""
    plan: dict[str, Any]
    """What was removed, or what was kept, as JSON values."""
    config: dict[str, Any] | None = None
    """Values that differ in the config of the checkpoint."""
    tensors: dict[str, Tensor] | None = None
    """Tensors kept instead of a checkpoint, if no checkpoint can hold the result."""


def linears_of(module: nn.Module) -> list[nn.Linear]:
    """All linear maps of a module, such as the decoder layers."""
    return [each for each in module.modules() if isinstance(each, nn.Linear)]


def threshold(scores: Iterable[Tensor], removed: Callable[[float], int], most: int) -> float:
    """The highest score such that dropping all up to it removes at most `most` parameters."""
    order = torch.cat(list(scores)).sort().values.tolist()
    number = bisect_right(order, most, key=removed)
    return float(order[number - 1]) if number else -math.inf


def refusing(
    has: Callable[[DecoderTraits], bool], why: str
) -> Callable[[DenseModel, torch.device], None]:
    """A check that raises a `UserError`, with `why`, if `has` is true of a model's family."""

    def require(dense: DenseModel, _: torch.device) -> None:
        if has(dense.traits):
            raise UserError(f"{dense.config.model_type} has {why}. Leave the method out.")

    return require


@torch.enable_grad()
def backward(
    inputs: PruneInputs,
    rows: int | None = None,
    after: Callable[[], None] = lambda: None,
    of_weights: bool = True,
) -> None:
    """Add up, over the rows of the calibration text, gradients of the next-token loss for matrices.

    `rows` of them run at once; `after` is called after each such batch. Without `of_weights`, only
    what depends on the residual stream has gradients.
    """
    model: Any = inputs.dense.model
    for parameter in inputs.layers.parameters():
        parameter.requires_grad = of_weights and parameter.dim() == 2
    rows = rows or max(1, TOKENS_AT_ONCE // inputs.tokens_BT.shape[1])
    batches = torch.split(inputs.tokens_BT.to(inputs.dense.device), rows)
    with recomputing(inputs.dense):
        for done, tokens_BT in enumerate(batches, 1):
            output = model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False)
            (output.loss * len(tokens_BT)).backward()
            after()
            inputs.on_progress(done, len(batches))


def damped_inverse(moment_II: Float[Tensor, "I I"]) -> Float[Tensor, "I I"]:
    """Inverse of a moment X^T X with 1 % of its mean diagonal added to the diagonal."""
    mean = float(moment_II.diagonal().mean())
    moment_II = moment_II.clone()
    moment_II.diagonal().add_(0.01 * mean or 1e-30)  # an all-zero moment has an inverse, too
    factor_II, failed = torch.linalg.cholesky_ex(moment_II)
    if failed:
        raise UserError(
            "the inputs of a linear map are not finite, so it cannot be pruned by them. "
            "Load the model with --dtype float32."
        )
    return torch.cholesky_inverse(factor_II)


def compensated(weight_OI: Tensor, moment_II: Tensor, kept_I: Tensor) -> Float[Tensor, "O I"]:
    """Weight whose kept columns compensate for the others, now zero, by damped least squares."""
    inverse_CI = damped_inverse(moment_II)[~kept_I]
    lost_CI: Tensor = torch.linalg.solve(inverse_CI[:, ~kept_I], inverse_CI)
    return (weight_OI - weight_OI[:, ~kept_I] @ lost_CI) * kept_I
