"""SLEB: one layer after the other is dropped, each time the one whose absence costs least.

In every round each layer that is left, but the first and the last, is bypassed on trial, and the
one with the least summed next-token loss on the calibration text goes. The published code reads a
few windows; here it is all calibration tokens, and what comes before the layer is computed once.
"""

from dotmoe.evaluate.models import nats_of
from dotmoe.models.dense import Stream
from dotmoe.pruning.contract import Pruned, PruneInputs
from dotmoe.pruning.shortgpt import num_to_drop, without_layers


def sleb(inputs: PruneInputs) -> Pruned:
    """Drop as many layers as come nearest to the budget, by what each costs then."""
    alive, dropped = list(range(len(inputs.layers))), list[int]()
    start, rounds = Stream(inputs.dense, inputs.tokens_BT), num_to_drop(inputs, keeping=2)
    for done in range(rounds):
        before, losses = start.clone(), dict[int, float]()
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
    return without_layers(inputs, dropped)


def _loss(inputs: PruneInputs, stream: Stream) -> float:
    """Summed next-token loss of what comes out of the last layer."""
    dense = inputs.dense
    norm = dense.family.trunk(dense.model).get_submodule("norm")
    return sum(
        float(nats_of(dense.model, norm(hidden_BTD[:, :-1]), inputs.tokens_BT[part, 1:]).sum())
        for part in stream.parts
        for hidden_BTD in [stream.hidden_BTD[part].to(dense.device)]
    )
