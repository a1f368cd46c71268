"""What fine-tuning of a converted model costs: only k of E experts are computed for a token."""

from dataclasses import dataclass
from typing import Literal

from dotmoe.inspection.costs import FFN_TENSORS_IN_BACKWARD, head_bytes
from dotmoe.inspection.placement import (
    Placement,
    frozen_bytes,
    gathered_parameters,
    layer_parameters,
    shard,
)
from dotmoe.inspection.sizes import Item, RunSize, Sizes
from dotmoe.inspection.work import (
    ADAM_BYTES,
    LOGIT_BYTES,
    ROUTER_BACKWARD_BYTES,
    ROUTER_BYTES,
    Work,
    attention_flops,
    backward_bytes,
    dense_bytes,
    share_of,
)

FLOAT32 = 4
MASTER_BYTES = 4 * FLOAT32
"""Of a trained weight: float32 value, gradient, and two Adam moments."""
GATHER_PASSES, GATHER_BACKWARD_PASSES = 4, 6
"""Over the input of an expert, once for each of k: it is gathered, and the outputs are summed."""
ROWS_IN_BACKWARD = 4
"""Tensors of that size at one moment of an expert layer's backward."""
GATED_BACKWARD_PASSES = 11
"""Of SiLU(gate) * up, over the width that runs."""

Train = Literal["everything", "router", "lora"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneSize:
    """Size of a fine-tuning of the converted model, for estimates with --task finetune."""

    finetune_tokens: int = 1_200_000_000
    """Tokens of fine-tuning. Paper: 1.2B."""
    finetune_batch_size: int = 128
    """Sequences a step of fine-tuning. Paper: 128 (tab:hyperparams_sft)."""
    train: Train = "everything"
    """What fine-tuning trains: all weights and the routers, the routers alone, or low-rank
    adapters on experts and attention and the routers."""
    lora_rank: int = 16
    """Rank of the adapters."""


def trained_parameters(sizes: Sizes, size: FinetuneSize) -> int:
    """How many parameters fine-tuning trains."""
    routers = sizes.counts.routers
    if size.train == "router":
        return routers
    if size.train == "everything":
        return sizes.counts.dense_total + routers
    return routers + adapter_parameters(sizes, size.lora_rank)


def adapter_parameters(sizes: Sizes, rank: int) -> int:
    """Entries of low-rank adapters of all attention projections, and of each expert's three."""
    split = sizes.granularity
    experts = 3 * split.num_experts * (sizes.widths.model + split.expert_size)
    return _attention_adapters(sizes, rank) + sizes.widths.layers * rank * experts


def _attention_adapters(sizes: Sizes, rank: int) -> int:
    """A projection of a to b has adapters of rank * (a + b)."""
    width, head_dim = sizes.widths.model, sizes.traits.head_dim
    queries, keys = sizes.heads * head_dim, sizes.kv_heads * head_dim
    return sizes.widths.layers * rank * (2 * (width + queries) + 2 * (width + keys))


def finetune_memory(
    sizes: Sizes, run: RunSize, size: FinetuneSize, *, checkpointing: bool, placement: Placement
) -> tuple[Item, ...]:
    """Peak of one step on one GPU, by item.

    Trained weights are float32 with a copy for the products, whole or gathered; where all are
    trained and sharded, no weight is whole for longer than it computes.

    Args:
        sizes: Of model and split; the weights that compute have `bytes_held`.
        run: Of the micro-batch.
        size: What is trained.
        checkpointing: Keep only each layer's input.
        placement: Among how many GPUs.
    """
    widths, tokens = sizes.widths, run.micro_batch_tokens
    trained, held = trained_parameters(sizes, size), sizes.bytes_held
    layer, stream = finetune_kept(sizes, size) * tokens, held * widths.model * tokens
    kept = widths.layers * stream + layer if checkpointing else widths.layers * layer
    split = sizes.granularity
    rows = ROWS_IN_BACKWARD * split.active_experts * widths.model
    working = held * tokens * (rows + FFN_TENSORS_IN_BACKWARD * split.active_neurons)
    if size.train != "everything":
        weights, states = frozen_bytes(sizes, placement), MASTER_BYTES * trained
        if size.train == "lora":
            # The sum of an expert's weights and its adapters stays for the layer's backward.
            layers = 1 if checkpointing else widths.layers
            weights += held * sizes.counts.ffn_total // widths.layers * layers
    elif placement.sharded and placement.ranks > 1:
        # The gradient of a layer is whole until it is reduced.
        weights = held * gathered_parameters(sizes) + FLOAT32 * layer_parameters(sizes)
        states = MASTER_BYTES * shard(trained, placement)
    else:
        weights, states = held * sizes.counts.dense_total, MASTER_BYTES * trained
    return (
        Item("weights that compute", weights),
        Item("trained weights, gradients, Adam", states),
        Item("activations kept for the backward", kept),
        Item("buffers of one layer, or one chunk of logits", max(working, head_bytes(sizes, run))),
        Item("hidden states", 2 * stream),
    )


def finetune_kept(sizes: Sizes, size: FinetuneSize) -> int:
    """Bytes that the backward of one layer keeps for each token.

        b * (2 N_k + 2 (H + H_kv) * head_dim + D) + 4 * (3 D + 4 E)

    with the N_k neurons that run; where all weights are trained, the inputs of attention too,
    b * D. What experts gather, and the products' inputs within them, is computed again.
    """
    split, width = sizes.granularity, sizes.widths.model
    attention = 2 * (sizes.heads + sizes.kv_heads) * sizes.traits.head_dim
    narrow = 2 * split.active_neurons + attention + width
    if size.train == "everything":
        narrow += width
    head_norms = attention // 2 if sizes.traits.qk_norm != "none" else 0
    return sizes.bytes_held * narrow + FLOAT32 * (3 * width + 4 * split.num_experts + head_norms)


def finetune_work(
    sizes: Sizes, run: RunSize, size: FinetuneSize, *, checkpointing: bool, placement: Placement
) -> tuple[Work, ...]:
    """One fine-tuning step on one GPU: next-token loss of the sparse model, no teacher.

    A backward costs one forward for the activations and, where all weights are trained, one more
    for the weights.
    """
    widths, split, share = sizes.widths, sizes.granularity, share_of(run, placement)
    layers, tokens, held = widths.layers, share.tokens, sizes.bytes_held
    products = 2 * (sizes.counts.attention_and_norms + sizes.counts.ffn_active)
    products += 2 * split.num_experts * widths.model * layers
    merging = 0
    if size.train == "lora":
        products += 2 * _attention_adapters(sizes, size.lora_rank)
        # Adapters of experts are added to their weights, once a pass.
        merging = 2 * size.lora_rank * sizes.counts.ffn_total * share.micro_batches
    attention = attention_flops(sizes, run.seq_len)
    head = 2 * widths.vocabulary * widths.model
    backward = 2 if size.train == "everything" else 1
    again = 1 if checkpointing else 0
    trained = trained_parameters(sizes, size)
    routed = held * split.active_experts * widths.model
    forward = dense_bytes(sizes, neurons=split.active_neurons) + GATHER_PASSES * routed
    forward += ROUTER_BYTES * split.num_experts
    ffn = held * GATED_BACKWARD_PASSES * split.active_neurons + GATHER_BACKWARD_PASSES * routed
    ffn += ROUTER_BACKWARD_BYTES * split.num_experts
    own = shard(trained, placement) if placement.sharded else trained
    # Weights of a micro-batch are copied for the products.
    copies = (FLOAT32 + held) * share.micro_batches * trained if size.train == "everything" else 0
    return (
        Work(
            part="forward",
            products=tokens * products + merging,
            attention=tokens * attention,
            moved=tokens * layers * forward + copies,
        ),
        Work(
            part="head and loss",
            products=tokens * (1 + backward) * head,
            logits=tokens * LOGIT_BYTES[held] // 2 * widths.vocabulary,
        ),
        Work(
            part="backward",
            products=tokens * (backward + again) * products + (2 + again) * merging,
            attention=tokens * (2 + again) * attention,
            moved=tokens * layers * (backward_bytes(sizes, ffn=ffn) + again * forward),
        ),
        Work(part="optimizer", moved=ADAM_BYTES * own),
    )
