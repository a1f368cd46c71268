"""Parts of a plan that stay in a processor's cache while several operations pass over them."""

from collections.abc import Iterator

import torch

CACHED_ELEMENTS = 2**17
"""Elements of a block on the CPU: half a MiB in float32, so that a few of them share a cache."""
GROUPED_ELEMENTS = 2**20
"""Elements up to which layers are solved together on the CPU; beyond, batching saves nothing."""


def blocks(shape: torch.Size, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Layers and neurons of consecutive parts of an L x N x E tensor.

    On the CPU a temporary as large as a plan costs more in page faults than the arithmetic on it.
    Other devices get everything as one part. Parts are whole runs of N / E neurons, which is what
    `column_sums` adds up.

    Args:
        shape: (L, N, E), where E divides N.
        device: Where the tensor lives.
    """
    num_layers, num_neurons, num_experts = shape
    if device.type != "cpu" or num_layers * num_neurons * num_experts <= CACHED_ELEMENTS:
        yield slice(0, num_layers), slice(0, num_neurons)
        return
    capacity = num_neurons // num_experts
    # A run of `capacity` rows has capacity * E = N elements.
    rows = capacity * max(1, CACHED_ELEMENTS * torch.get_num_threads() // num_neurons)
    for layer in range(num_layers):
        for first in range(0, num_neurons, rows):
            yield slice(layer, layer + 1), slice(first, min(first + rows, num_neurons))


def layer_groups(shape: torch.Size, device: torch.device) -> Iterator[slice]:
    """Layers of an L x N x E problem to be solved in one batch."""
    num_layers, num_neurons, num_experts = shape
    group = max(1, GROUPED_ELEMENTS // (num_neurons * num_experts))
    if device.type != "cpu":
        group = max(1, num_layers)
    for first in range(0, num_layers, group):
        yield slice(first, min(first + group, num_layers))
