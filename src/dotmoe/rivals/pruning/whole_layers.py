"""ShortGPT and SLEB: drop the whole layers that cost least.

ShortGPT drops the layers of least block influence, all at once. The influence of a layer is 1 - the
mean cosine, over tokens, of the stream before and after it, in one pass of the dense model. The
published code measures the last layer's after the final norm; here all are of the stream.

SLEB drops one layer after the other: in every round each remaining layer, except the first and the
last, is bypassed on trial, and the one with the least summed next-token loss on the calibration
text is dropped. The published code reads a few windows; here all calibration tokens are read, and
what comes before the layer is computed once. Neither method changes anything else.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from dotmoe.models.meta_model import num_parameters
from dotmoe.models.scoring import nats_of
from dotmoe.models.stream import Stream
from dotmoe.rivals.pruning.contract import Pruned, PruneInputs


def shortgpt(inputs: PruneInputs) -> Pruned:
    """Drop the layers of least block influence, as many as come nearest to the budget."""
    order = block_influence(inputs).argsort(stable=True).tolist()
    return _without(inputs, order[: _num_to_drop(inputs, keeping=1)])


def block_influence(inputs: PruneInputs) -> Float[Tensor, " L"]:
    """Block influence of each layer, 0 to 2: 1 - the mean cosine of the stream before and after."""
    stream = Stream(inputs.dense, inputs.tokens_BT)
    scores = []
    for index in range(len(inputs.layers)):
        before_BTD = stream.hidden_BTD.double()
        stream.advance(index)
        cosine_BT = F.cosine_similarity(before_BTD, stream.hidden_BTD.double(), dim=-1)
        scores.append(1 - cosine_BT.mean())
        inputs.on_progress(index + 1, len(inputs.layers))
    return torch.stack(scores)


def sleb(inputs: PruneInputs) -> Pruned:
    """Drop layers one by one by their current cost, as many as come nearest to the budget."""
    start = Stream(inputs.dense, inputs.tokens_BT)
    rounds = _num_to_drop(inputs, keeping=2)
    alive = list(range(len(inputs.layers)))
    dropped = list[int]()
    for done in range(rounds):
        before = start.clone()
        losses = dict[int, float]()
        for place, layer in enumerate(alive[:-1]):
            if place > 0:
                behind = before.clone()
                for later in alive[place + 1 :]:
                    behind.advance(later)
                losses[layer] = _loss(inputs, behind)
            before.advance(layer)
        dropped.append(min(losses, key=losses.__getitem__))
        alive.remove(dropped[-1])
        inputs.on_progress(done + 1, rounds)
    return _without(inputs, dropped)


def _loss(inputs: PruneInputs, stream: Stream) -> float:
    """Summed next-token loss of the stream after the last layer."""
    dense = inputs.dense
    loss = 0.0
    norm = dense.model.get_submodule("model.norm")
    for part in stream.parts:
        hidden_BTD = norm(stream.hidden_BTD[part].to(dense.device)[:, :-1])
        loss += float(nats_of(dense.model, hidden_BTD, inputs.tokens_BT[part, 1:]).sum())
    return loss


def _num_to_drop(inputs: PruneInputs, keeping: int) -> int:
    """Number of layers whose parameters are nearest to the excess; at least `keeping` stay."""
    wanted = round(inputs.excess / num_parameters(inputs.layers[0]))
    return max(0, min(wanted, len(inputs.layers) - keeping))


def _without(inputs: PruneInputs, dropped: list[int]) -> Pruned:
    """Take layers out of the model and of its config."""
    dense, layers = inputs.dense, inputs.layers
    removed = sum(num_parameters(layers[index]) for index in dropped)
    kept = [index for index in range(len(layers)) if index not in dropped]
    trunk: Any = dense.model.get_submodule("model")
    trunk.layers = nn.ModuleList(layers[old] for old in kept)
    for index, layer in enumerate(trunk.layers):
        layer.self_attn.layer_idx = index  # the cache keeps its keys under this index
    changed: dict[str, Any] = {"num_hidden_layers": len(kept)}
    if types := getattr(dense.config, "layer_types", None):
        changed["layer_types"] = [types[old] for old in kept]
    dense.config.update(changed)
    return Pruned(removed, {"layers": dropped}, changed)
