"""SliceGPT: rotate the residual stream to its principal axes, and keep only the first of them.

The published method rotates weights with the PCA of the stream at the embedding, after every
attention and after every FFN but the last, each computed with all earlier cuts in place, and cuts
them to one width everywhere; every addition to the stream gets a matrix from the axes before to
those after it. Here the weights stay and the stream is projected onto the axes at these places,
which gives the same logits; parameters are counted as if the weights were cut. No stock
architecture has those matrices, so there is no checkpoint. The published code subtracts each
embedding's mean, which suits only LayerNorm; that is left out.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hooks import input_hooks
from dotmoe.models.meta_model import num_parameters
from dotmoe.models.stream import Stream
from dotmoe.rivals.pruning.contract import Pruned, PruneInputs, refusing


def slicegpt(inputs: PruneInputs) -> Pruned:
    """Find the axes of the stream at each place, as many as come nearest to the budget."""
    dense = inputs.dense
    size = inputs.dense.widths.model
    counts = {width: sliced_parameters(dense, width) for width in (*range(8, size, 8), size)}
    width = min(counts, key=lambda width: abs(counts[width] - inputs.wanted))
    stream = Stream(dense, inputs.tokens_BT)
    axes = list[Tensor]()

    def cut(index: int) -> None:
        """Add axes for the first place that has none, which the stream passes in this layer."""
        moment_DD = torch.zeros(size, size, dtype=torch.float64, device=dense.device)

        def see(hidden_BTD: Tensor) -> None:
            hidden_TD = hidden_BTD.flatten(0, 1).to(moment_DD)
            moment_DD.addmm_(hidden_TD.T, hidden_TD)

        with sliced(dense, axes, see):
            for part in stream.parts:
                stream.after(index, part)
        axes.append(torch.linalg.eigh(moment_DD).eigenvectors[:, -width:].float())

    last = len(inputs.layers) - 1
    cut(0)
    for index in range(last + 1):
        for _ in range(1 if index == last else 2):  # after attention, after FFN
            cut(index)
        with sliced(dense, axes):
            stream.advance(index)
        inputs.on_progress(index + 1, last + 1)
    removed = num_parameters(dense.model) - counts[width]
    return Pruned(removed, {"width": width}, tensors={"axes_SDK": torch.stack(axes).cpu()})


require_norms_before = refusing(
    lambda traits: traits.norms_after,
    "norms after attention and FFN, but slicegpt needs them before",
)


@contextmanager
def sliced(
    dense: DenseModel, axes_SDK: Sequence[Tensor] | Tensor, see: Any = None
) -> Iterator[None]:
    """Within this context, the stream is projected onto the axes of each place that has them.

    Places are the embedding, then after attention and after FFN of each layer except the last FFN;
    the last places may have no axes. `see` is called with the stream at the first such place.
    """
    layers = dense.family.layers(dense.model)
    factor = dense.traits.multipliers.residual
    entering: list[Tensor] = []

    def at(place: int, hidden_BTD: Tensor) -> Tensor:
        if place < len(axes_SDK):
            axes_DK = axes_SDK[place].to(hidden_BTD)
            return hidden_BTD @ axes_DK @ axes_DK.T
        if place == len(axes_SDK) and see is not None:
            see(hidden_BTD)
        return hidden_BTD

    def before(index: int, hidden_BTD: Tensor) -> Tensor:
        entering[:] = [at(0, hidden_BTD) if index == 0 else hidden_BTD]
        return entering[0]

    def behind_attention(index: int, attention: nn.Module, arguments: Any, output: Any) -> Any:
        (hidden_BTD,) = entering
        added_BTD = at(2 * index + 1, hidden_BTD + factor * output[0]) - hidden_BTD
        return (added_BTD / factor, *output[1:])

    def behind_ffn(index: int, layer: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        return at(2 * index + 2, output)

    with ExitStack() as hooks:
        hooks.enter_context(input_hooks(dict(enumerate(layers)), before))
        for index, layer in enumerate(layers):
            attention: Any = layer.self_attn
            hooks.enter_context(attention.register_forward_hook(partial(behind_attention, index)))
            hooks.enter_context(layer.register_forward_hook(partial(behind_ffn, index)))
        yield


def sliced_parameters(dense: DenseModel, width: int) -> int:
    """Parameters of the model cut to a width, with two matrices in each layer and an uncut head."""
    size = dense.widths.model
    layers = dense.family.layers(dense.model)
    total = (width + size) * dense.widths.vocabulary
    for index, layer in enumerate(layers):
        leaving = width if index + 1 < len(layers) else size
        for name, parameter in layer.named_parameters():
            if name.endswith("o_proj.weight"):
                total += parameter.shape[1] * width
            elif name.endswith("down_proj.weight"):
                total += parameter.shape[1] * leaving
            elif parameter.dim() == 2:
                total += parameter.shape[0] * width
            elif "layernorm" not in name:  # those are folded into weights
                total += parameter.numel()
        total += width * width + width * leaving
    return total
