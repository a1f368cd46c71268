"""Put masked FFNs into a dense model, and take them out again."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dotmoe.artifacts import DenseModel
from dotmoe.layout import ExpertLayout
from dotmoe.moe.masked_ffn import MaskedFFN, Masking


@contextmanager
def masked(dense: DenseModel, masking: Masking) -> Iterator[None]:
    """Inside, every FFN of `dense.model` obeys `masking`; afterwards the model is as before."""
    layers = dense.family.layers(dense.model)
    originals = [layer.get_submodule("mlp") for layer in layers]
    for index, (layer, original) in enumerate(zip(layers, originals, strict=True)):
        layer.mlp = MaskedFFN(original, dense.family.ffn(layer), masking, index)
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
        expert_of_neuron_LN=layout.expert_of_neuron_LN.to(device),
        router_LED=layout.router_LED.to(device, torch.float32),
        active_experts=layout.active_experts,
    )
    with masked(dense, masking):
        yield
