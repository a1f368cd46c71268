"""Two zeros in every four weights of a row (2:4), and the layer-by-layer frame of such methods.

All linear maps of the decoder layers are pruned; embeddings, head and norms stay. The fours lie
along the inputs of an output.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn

from dotmoe.errors import UserError
from dotmoe.models.dense import DenseModel, Stream
from dotmoe.pruning.contract import Pruned, PruneInputs


def magnitude_2_4(inputs: PruneInputs) -> Pruned:
    """Zero the two smallest weights of each four: the control, which reads no text."""
    for linear in linears_of(inputs.layers):
        linear.weight *= kept_of_four(linear.weight.abs())
    return halved(inputs)


def require_fours(dense: DenseModel) -> None:
    """Refuse widths that are no whole fours."""
    linears_of(dense.family.layers(dense.model))


def kept_of_four(score_OI: Float[Tensor, "O I"]) -> Bool[Tensor, "O I"]:
    """Where a score is one of the two largest of its four; of equal ones the later is larger."""
    fours = score_OI.reshape(len(score_OI), -1, 4)
    rank = fours.argsort(dim=-1, stable=True).argsort(dim=-1)
    return rank.flatten(1) >= 2


def halved(inputs: PruneInputs) -> Pruned:
    """The count of every such method."""
    linears = linears_of(inputs.layers)
    return Pruned(sum(linear.weight.numel() for linear in linears) // 2, {"pattern": "2:4"})


def prune_linears(
    inputs: PruneInputs,
    moment: Callable[[Float[Tensor, "T I"]], Tensor],
    prepare: Callable[[Tensor], Any],
    pruned: Callable[[Float[Tensor, "O I"], Any], Float[Tensor, "O I"]],
) -> Pruned:
    """Prune the linear maps of each layer by what they read behind the pruned layers before it.

    All statistics of a layer are of the layer as it was. Maps that read the same tensor share them.

    Args:
        inputs: Of the method.
        moment: Of inputs in float64; summed over all tokens.
        prepare: Makes of that sum what `pruned` needs, once for all maps that read the same.
        pruned: New weight of an old one, in float64.
    """
    stream = Stream(inputs.dense, inputs.tokens_BT)
    for index, layer in enumerate(inputs.layers):
        first, sums = _input_sums(stream, index, layer, moment)
        prepared = {linear: prepare(total) for linear, total in sums.items()}
        for linear, reads in first.items():
            linear.weight.copy_(pruned(linear.weight.double(), prepared[reads]))
        stream.advance(index)
        inputs.on_progress(index + 1, len(inputs.layers))
    return halved(inputs)


def linears_of(module: nn.Module) -> list[nn.Linear]:
    """All linear maps of a module.

    Raises:
        UserError: Fours do not fit one.
    """
    found = [each for each in module.modules() if isinstance(each, nn.Linear)]
    for linear in found:
        if linear.in_features % 4:
            raise UserError(
                f"a linear map reads {linear.in_features} features, which are not whole fours, so "
                "2:4 does not fit the model. Leave the 2_4 methods out."
            )
    return found


def _input_sums(
    stream: Stream, index: int, layer: nn.Module, moment: Callable[[Tensor], Tensor]
) -> tuple[dict[nn.Linear, nn.Linear], dict[nn.Linear, Tensor]]:
    """The first map that reads the same tensor as a map does, and of those the summed moment."""
    first: dict[nn.Linear, nn.Linear] = {}
    sums: dict[nn.Linear, Tensor] = {}
    seen: list[tuple[Tensor, nn.Linear]] = []

    def see(linear: Any, arguments: tuple[Tensor, ...]) -> None:
        (x,) = arguments
        first[linear] = next((before for read, before in seen if read is x), linear)
        if first[linear] is linear:
            seen.append((x, linear))
            sums[linear] = sums.get(linear, 0) + moment(x.flatten(0, -2).double())

    hooks = [linear.register_forward_pre_hook(see) for linear in linears_of(layer)]
    try:
        for part in stream.parts:
            seen.clear()
            stream.after(index, part)
    finally:
        for hook in hooks:
            hook.remove()
    return first, sums
