"""Which leading layers stay dense: those that lose far more than the others by a smaller FFN."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dotmoe.method.calibrate import require_finite_layer
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hooks import input_hooks
from dotmoe.models.load import whole_weights
from dotmoe.models.stream import Stream
from dotmoe.models.targets import TARGETS
from dotmoe.text.blocks import TokenBlocks

_TINY = 1e-30
_OUTLIER = 4.0
"""Multiple of the median layer's error from which a leading layer is better kept dense."""
LAYERS_PER_DENSE = 12
"""Number of layers of which one at most is kept dense unasked: more would cost too much."""
OUTLIER_TOKENS = 2048
"""Number of tokens on which layers are compared."""


def leading_outliers(
    dense: DenseModel, text: TokenBlocks, share: float
) -> tuple[int, Float[Tensor, " L"]]:
    """Number of leading layers to keep dense, and what each layer loses, see `pruning_errors`."""
    errors_L = pruning_errors(dense, text.drawn(OUTLIER_TOKENS), share)
    return num_leading_outliers(errors_L), errors_L


@torch.no_grad()
def pruning_errors(dense: DenseModel, tokens_BT: Tensor, share: float) -> Float[Tensor, " L"]:
    """What each layer alone would lose if always the same `share` of its FFN neurons ran.

    The neurons are those of largest mean energy. The loss is the square error of what the FFN adds
    to the residual stream, after its norm if one follows, as a share of the stream's square after
    the layer, at most 1, the mean over tokens. If the model is sharded, every rank must call this.
    """
    factor = dense.traits.multipliers.residual
    stream = Stream(dense, tokens_BT)
    inputs = list[Tensor]()
    errors = list[Tensor]()
    for index, layer in enumerate(dense.family.layers(dense.model)):
        inputs.clear()
        block = dense.family.block(layer, TARGETS["ffn"])
        with input_hooks({0: block}, lambda _, x: inputs.append(x)):
            stream.advance(index)
        with whole_weights(dense, index):
            ffn = dense.family.ffn(layer)
            x_TD = torch.cat([x.flatten(0, -2) for x in inputs])
            hidden_TN = ffn.hidden(x_TD).float()
            down_DN = ffn.down.weight.float()
            energy_N = (hidden_TN.square().mean(0) * down_DN.square().sum(0)).cpu()
            norm = dense.family.norm_after(layer, TARGETS["ffn"])
            added_TD = norm(F.linear(hidden_TN, down_DN))
            hidden_TN[:, energy_N.argsort(descending=True)[round(share * len(energy_N)) :]] = 0
            lost_TD = factor * (added_TD - norm(F.linear(hidden_TN, down_DN)))
        size_T = stream.hidden_BTD.flatten(0, 1).float().square().sum(1).clamp_min(_TINY)
        require_finite_layer(lost_TD, index, x_TD.dtype)
        errors.append((lost_TD.square().sum(1).cpu() / size_T).clamp(max=1).mean())
    return torch.stack(errors)


def num_leading_outliers(errors_L: Float[Tensor, " L"]) -> int:
    """How many leading layers lose more than 4 times the median; at most one layer of 12."""
    is_outlier_L = errors_L > _OUTLIER * errors_L.median()
    leading = int(is_outlier_L.long().cumprod(0).sum())
    return min(leading, len(errors_L) // LAYERS_PER_DENSE)
