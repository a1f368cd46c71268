"""ShortGPT: layers that change the residual stream least are dropped, all at once.

The block influence of a layer is 1 - the mean cosine, over tokens, of the stream before and behind
it, in one pass of the dense model. The layers of least influence go; nothing else changes. The
published code reads the last layer's from behind the final norm; here all are of the stream.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from dotmoe.models.dense import Stream
from dotmoe.parameters import num_parameters
from dotmoe.pruning.contract import Pruned, PruneInputs


def shortgpt(inputs: PruneInputs) -> Pruned:
    """Drop as many layers as come nearest to the budget, by their influence."""
    order = block_influence(inputs).argsort(stable=True).tolist()
    return without_layers(inputs, order[: num_to_drop(inputs, keeping=1)])


def block_influence(inputs: PruneInputs) -> Float[Tensor, " L"]:
    """How far each layer turns the stream, 0 to 2, on average over the tokens."""
    stream, scores = Stream(inputs.dense, inputs.tokens_BT), []
    for index in range(len(inputs.layers)):
        before_BTD = stream.hidden_BTD.double()
        stream.advance(index)
        cosine_BT = F.cosine_similarity(before_BTD, stream.hidden_BTD.double(), dim=-1)
        scores.append(1 - cosine_BT.mean())
        inputs.on_progress(index + 1, len(inputs.layers))
    return torch.stack(scores)


def num_to_drop(inputs: PruneInputs, keeping: int) -> int:
    """Layers whose parameters come nearest to the excess, with at least `keeping` left."""
    wanted = round(inputs.excess / num_parameters(inputs.layers[0]))
    return max(0, min(wanted, len(inputs.layers) - keeping))


def without_layers(inputs: PruneInputs, dropped: list[int]) -> Pruned:
    """Take layers out of the model and of its config."""
    dense, layers = inputs.dense, inputs.layers
    removed = sum(num_parameters(layers[index]) for index in dropped)
    kept = [index for index in range(len(layers)) if index not in dropped]
    trunk: Any = dense.family.trunk(dense.model)
    trunk.layers = nn.ModuleList(layers[old] for old in kept)
    for index, layer in enumerate(trunk.layers):
        layer.self_attn.layer_idx = index  # where the cache keeps its keys
    types = getattr(dense.config, "layer_types", None)
    changed: dict[str, Any] = {"num_hidden_layers": len(kept)}
    if types:
        changed["layer_types"] = [types[old] for old in kept]
    for key, value in changed.items():
        setattr(dense.config, key, value)
    return Pruned(removed, {"layers": dropped}, changed)
