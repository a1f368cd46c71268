"""The one way to replace the FFNs of a model, and to recompute its layers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from dotmoe.models.dense import DenseModel


@contextmanager
def replaced(
    dense: DenseModel, layers: Iterable[int], make: Callable[[int, nn.Module], nn.Module]
) -> Iterator[None]:
    """Inside, the FFN of each of `layers` is `make(layer, its FFN)`; then all is as before."""
    modules = dense.family.layers(dense.model)
    originals = {index: modules[index].get_submodule("mlp") for index in layers}
    try:
        for index, ffn in originals.items():
            modules[index].mlp = make(index, ffn)
        yield
    finally:
        for index, ffn in originals.items():
            modules[index].mlp = ffn


@contextmanager
def recomputing(dense: DenseModel, enabled: bool = True) -> Iterator[None]:
    """Inside, if `enabled`, each layer keeps its input only and runs again in the backward pass."""
    layers = list(dense.family.layers(dense.model)) if enabled else []
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # uncovers the class's own
