"""Put masked FFNs into a dense model, and take them out again."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from dotmoe.artifacts import DenseModel
from dotmoe.layout import ExpertLayout
from dotmoe.moe.masked_ffn import MaskedFFN, Masking


@contextmanager
def masked(dense: DenseModel, masking: Masking) -> Iterator[None]:
    """Inside, every split FFN of `dense.model` obeys `masking`; afterwards all is as before."""
    layers = list(dense.family.layers(dense.model))
    originals = [layer.get_submodule("mlp") for layer in layers]
    for index in range(masking.first_layer, len(layers)):
        ffn = dense.family.ffn(layers[index])
        layers[index].mlp = MaskedFFN(originals[index], ffn, masking, index)
    try:
        yield
    finally:
        for layer, original in zip(layers, originals, strict=True):
            layer.mlp = original


@contextmanager
def masked_by(dense: DenseModel, layout: ExpertLayout) -> Iterator[None]:
    """Inside, `dense.model` computes exactly the MoE that the layout describes (eq:moe_output).

    Hard top-k routing from float32 logits, chosen experts summed with weight 1. This is the
    reference that every export is compared with.
    """
    device = next(dense.model.parameters()).device
    masking = Masking(
        expert_of_neuron_LN=layout.expert_of_neuron_LN.to(device) % (layout.num_experts + 1),
        router_LED=layout.router_LED.to(device, torch.float32),
        active_experts=layout.active_experts,
        always_on=layout.shared_size > 0,
        first_layer=layout.first_dense_layers,
    )
    with masked(dense, masking):
        yield


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
