"""The contract of a method that prunes, and what several of them compute."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dotmoe.errors import UserError
from dotmoe.models.family import TOKENS_AT_ONCE, DecoderTraits, DenseModel, num_parameters
from dotmoe.moe.masked import recomputing
from dotmoe.progress import Update, no_update


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneInputs:
    """What every method gets: the same model, tokens and budget."""

    dense: DenseModel
    """In memory; the method changes it, without gradients unless it turns them on."""
    tokens_BT: Int[Tensor, "B T"]
    """Calibration text, int64."""
    wanted: int
    """Parameters that are to work on one token, counted as `ParameterCounts.active`."""
    batch: Callable[[int], Int[Tensor, "B T"]]
    """Training text of a step, for a method that is trained; so are the next two."""
    steps: int = 0
    seed: int = 0
    on_progress: Update = no_update
    log: Callable[[str], None] = lambda text: None
    """Shows a line."""

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return self.dense.family.layers(self.dense.model)

    @property
    def excess(self) -> int:
        """Parameters to remove."""
        return num_parameters(self.dense.model) - self.wanted


class Pruned(NamedTuple):
    """What a method took out of the model that it was given."""

    removed: int
    """Parameters that work on no token any more, by the plan: a zero may be there by chance."""
    plan: dict[str, Any]
    """What was removed, as JSON values."""
    config: dict[str, Any] | None = None
    """What has another value in the config of the checkpoint."""
    tensors: dict[str, Tensor] | None = None
    """What is kept in place of a checkpoint, where none can hold the result."""


def linears_of(module: nn.Module) -> list[nn.Linear]:
    """All linear maps of a module, such as the decoder layers."""
    return [each for each in module.modules() if isinstance(each, nn.Linear)]


def threshold(scores: Iterable[Tensor], removed: Callable[[float], int], most: int) -> float:
    """The highest score such that, without it and all below it, at most so many parameters go."""
    order = torch.cat(list(scores)).sort().values.tolist()
    number = bisect_right(order, most, key=removed)
    return float(order[number - 1]) if number else -math.inf


def refusing(
    has: Callable[[DecoderTraits], bool], why: str
) -> Callable[[DenseModel, torch.device], None]:
    """What raises a `UserError` for a model whose family has such traits, and says why."""

    def require(dense: DenseModel, _: torch.device) -> None:
        if has(dense.family.traits(dense.config)):
            raise UserError(f"{dense.config.model_type} has {why}. Leave it out.")

    return require


@torch.enable_grad()
def backward(
    inputs: PruneInputs,
    rows: int | None = None,
    after: Callable[[], None] = lambda: None,
    of_weights: bool = True,
) -> None:
    """Gradients of the next-token loss of each row of the calibration text, summed; of matrices.

    So many rows run at once; `after` is called behind each such step. Without weights, only what
    depends on the residual stream has gradients.
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
    mean, moment_II = float(moment_II.diagonal().mean()), moment_II.clone()
    moment_II.diagonal().add_(0.01 * mean or 1e-30)  # what is all zero has an inverse, too
    factor_II, failed = torch.linalg.cholesky_ex(moment_II)
    if failed:
        raise UserError(
            "the inputs of a linear map are no finite numbers, so it cannot be pruned by them. "
            "Load the model with --dtype float32."
        )
    return torch.cholesky_inverse(factor_II)


def made_up(weight_OI: Tensor, moment_II: Tensor, kept_I: Tensor) -> Float[Tensor, "O I"]:
    """Weight whose kept columns make up for the others, which are zero: damped least squares."""
    inverse_CI = damped_inverse(moment_II)[~kept_I]
    lost_CI: Tensor = torch.linalg.solve(inverse_CI[:, ~kept_I], inverse_CI)
    return (weight_OI - weight_OI[:, ~kept_I] @ lost_CI) * kept_I
