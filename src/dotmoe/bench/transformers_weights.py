"""The weights of a Transformers model in memory, grouped by when they are used."""

from typing import Any

from torch import nn

from dotmoe.bench.weights import NOTHING, ModelWeights, WeightGroup

_EXPERTS_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


def num_experts(config: Any) -> int:
    """Experts a layer (E) of a Hugging Face config; 0 for a dense model."""
    for key in _EXPERTS_KEYS:
        value = getattr(config, key, None)
        if value:
            return int(value)
    return 0


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that hold the routed experts, by layer; all their weights are [E, ...]."""
    return [
        module
        for name, module in model.named_modules()
        if name.endswith(".experts") and any(p.dim() == 3 for p in module.parameters())
    ]


def model_weights(model: Any) -> ModelWeights:
    """Group the weights of a causal language model as it is held in memory."""
    config = model.config
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    experts = num_experts(config)
    routed = {id(p) for module in expert_modules(model) for p in module.parameters()}
    fixed, all_experts = NOTHING, NOTHING
    for parameter in model.parameters():
        if parameter is embedding or parameter is head:
            continue
        if id(parameter) in routed:
            all_experts += _group(parameter, matrix_dims=3)
        else:
            fixed += _group(parameter, matrix_dims=2)
    heads = config.num_attention_heads
    return ModelWeights(
        embedding_row_bytes=embedding.shape[1] * embedding.element_size(),
        head=_group(head, matrix_dims=2),
        fixed=fixed,
        expert=WeightGroup(
            num_bytes=all_experts.num_bytes // max(1, experts),
            products=all_experts.products // max(1, experts),
        ),
        num_experts=experts,
        active_experts=int(config.num_experts_per_tok) if experts else 0,
        late_products=0,
        layers=config.num_hidden_layers,
        heads=heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def _group(parameter: nn.Parameter, *, matrix_dims: int) -> WeightGroup:
    return WeightGroup(
        num_bytes=parameter.numel() * parameter.element_size(),
        products=parameter.numel() if parameter.dim() == matrix_dims else 0,
    )
