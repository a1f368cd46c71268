"""What a conversion costs in memory, disk and arithmetic: estimates from sizes alone.

Every figure is a sum of named items, so a reader can check each. They are estimates for planning:
allocator slack, the framework itself (about 1 GiB on a GPU) and the operating system come on top.
"""

from dotmoe.inspection.placement import ALONE, Placement, affinity_entries, frozen_bytes
from dotmoe.inspection.sizes import (
    PAPER_TOKENS,
    Item,
    RunSize,
    Sizes,
    sizes_of,
    total,
)
from dotmoe.moe.distillation import chunk_rows

__all__ = [
    "PAPER_TOKENS",
    "Item",
    "RunSize",
    "Sizes",
    "alignment_flops",
    "alignment_memory",
    "calibration_memory",
    "disk",
    "export_memory",
    "exported_bytes",
    "kept_per_token",
    "sizes_of",
    "total",
]

FLOAT32 = 4
BYTES_PER_TRAINABLE = 3 * FLOAT32
"""Value and two Adam moments, all float32; there between steps too."""
UPDATE_COPIES = 3
"""Of the affinities, while their gradient is formed from the plan's and while Adam uses it."""
HEAD_CHUNK_COPIES = 3
"""Float32 tensors of one chunk of logits that live at the same time in the distillation loss."""
FFN_TENSORS_KEPT = 2
"""Of width N, for the backward of SiLU(gate) * up: both; weights are frozen."""
FFN_TENSORS_IN_BACKWARD = 5
"""Of width N, while the gradient passes one FFN."""


def kept_per_token(sizes: Sizes) -> int:
    """Bytes that the backward pass of one masked layer keeps for each token.

        b * (2 N + 2 (H + H_kv) * head_dim) + 4 * (3 D + 4 E)

    Frozen projections keep nothing of their inputs. In float32: the inputs of both norms and of
    the router, four tensors of router scores, and the inputs of query and key norms if there are.
    """
    attention = 2 * (sizes.heads + sizes.kv_heads) * sizes.traits.head_dim
    head_norms = attention // 2 if sizes.traits.qk_norm != "none" else 0
    narrow = FFN_TENSORS_KEPT * sizes.widths.ffn + attention
    wide = 3 * sizes.widths.model + 4 * sizes.granularity.num_experts + head_norms
    return sizes.bytes_held * narrow + FLOAT32 * wide


def calibration_memory(sizes: Sizes, run: RunSize) -> tuple[Item, ...]:
    """Peak of the start from data, by item; it is over before alignment begins."""
    widths, tokens = sizes.widths, run.calibration_tokens
    inputs = sizes.bytes_held * widths.layers * widths.model * tokens
    return (
        Item("dense weights", sizes.bytes_held * sizes.counts.dense_total),
        Item("FFN inputs of all layers", inputs),
        # Contributions, the same centred, and as unit vectors.
        Item("contributions of one layer", 3 * FLOAT32 * widths.ffn * tokens),
        Item("affinities and routers", FLOAT32 * sizes.trainables),
    )


def alignment_memory(
    sizes: Sizes, run: RunSize, *, checkpointing: bool, placement: Placement = ALONE
) -> tuple[Item, ...]:
    """Peak of one alignment step on one device, by item: what is there at that moment.

    It comes in the forward and backward pass of a micro-batch, or, where the affinities are larger
    than all activations, in their update. From the second micro-batch of a step on, the gradients
    that the first has left are there too.

    Args:
        sizes: Of model and split.
        run: Of the micro batch; the device decides how large a chunk of logits is.
        checkpointing: Keep only each layer's input, and compute the layer again in the backward.
        placement: Among how many devices; each has the plan's gradient whole and the rest of the
            affinities by layer.
    """
    widths, tokens = sizes.widths, run.micro_batch_tokens
    layer = kept_per_token(sizes) * tokens
    stream = sizes.bytes_held * widths.model * tokens
    kept = widths.layers * stream + layer if checkpointing else widths.layers * layer
    working = FFN_TENSORS_IN_BACKWARD * sizes.bytes_held * widths.ffn * tokens
    plan = FLOAT32 * affinity_entries(sizes, placement)
    gradients = FLOAT32 * sizes.trainables
    earlier = gradients if run.batch_size > placement.ranks * run.micro_batch_size else 0
    passes = (plan + earlier, kept, max(working, head_bytes(sizes, run)), 3 * stream)
    whole = gradients if placement.ranks > 1 else 0
    update = (whole + UPDATE_COPIES * plan, 0, 0, 0)
    peak = max(passes, update, key=sum)
    own = affinity_entries(sizes, placement) + sizes.counts.routers
    return (
        Item("dense weights, one copy", frozen_bytes(sizes, placement)),
        Item("affinities, routers, Adam", BYTES_PER_TRAINABLE * own),
        Item("soft plan and gradients", peak[0]),
        Item("activations kept for the backward", peak[1]),
        Item("buffers of one layer, or one chunk of logits", peak[2]),
        Item("hidden states of teacher and student", peak[3]),
    )


def head_bytes(sizes: Sizes, run: RunSize) -> int:
    """Buffers of the distillation loss for one chunk of tokens."""
    vocabulary = sizes.widths.vocabulary
    rows = min(run.micro_batch_tokens, chunk_rows(vocabulary, on_cpu=run.device == "cpu"))
    rounded = sizes.bytes_held if sizes.bytes_held < FLOAT32 else 0
    return rows * vocabulary * (HEAD_CHUNK_COPIES * FLOAT32 + rounded)


def exported_bytes(sizes: Sizes) -> tuple[Item, ...]:
    """The exported folder (glm4_moe), by item."""
    widths, written = sizes.widths, sizes.written.itemsize
    split = sizes.granularity
    tied = 0 if sizes.counts.output_head else sizes.counts.input_embedding
    zeros = 3 * split.expert_size * widths.model * widths.layers
    return (
        Item("exported weights and routers", written * sizes.counts.stored),
        Item("tied head written out", written * tied),
        Item("zero shared expert of the format", written * zeros),
        Item("router score biases", FLOAT32 * widths.layers * split.num_experts),
    )


def export_memory(sizes: Sizes, *, max_shard_bytes: int = 4 << 30) -> tuple[Item, ...]:
    """Peak of the export with its verification, which reloads the result beside the dense model."""
    exported = sum(item.amount for item in exported_bytes(sizes))
    return (
        Item("dense weights", sizes.bytes_held * sizes.counts.dense_total),
        Item("exported model, reloaded to verify", exported),
        Item("one shard at most", min(exported, max_shard_bytes)),
    )


def disk(sizes: Sizes, run: RunSize) -> tuple[Item, ...]:
    """Bytes on disk, by item."""
    widths = sizes.widths
    layout = FLOAT32 * (widths.layers * widths.ffn + sizes.counts.routers)
    return (
        Item(
            "dense checkpoint (unless it is there)",
            sizes.stored.itemsize * sizes.counts.dense_total,
        ),
        Item("packed tokens", 4 * (run.tokens + run.calibration_tokens)),
        # A, routers and both moments; while a new one is written the last one is still there.
        Item("two alignment checkpoints", 2 * 3 * FLOAT32 * sizes.trainables),
        Item("layout", layout),
        Item("exported folder", sum(item.amount for item in exported_bytes(sizes))),
    )


def alignment_flops(sizes: Sizes, run: RunSize) -> tuple[Item, ...]:
    """Floating-point operations of the whole alignment, by item; 2 for a multiply and add.

    A forward is 2 * (parameters in matrix products) a token, and 2 * seq_len * heads * head_dim a
    layer for causal attention. Weights are frozen, so their products cost the backward as much as
    one forward, not two; only attention, a product of two activations, costs it twice.
    """
    widths, counts = sizes.widths, sizes.counts
    experts = sizes.granularity.num_experts
    # An embedding look-up costs nothing; a head costs its size, tied or not.
    products = counts.attention_and_norms + counts.ffn_total + counts.input_embedding
    attention = 2 * run.seq_len * sizes.heads * sizes.traits.head_dim * widths.layers
    forward = 2 * products + attention
    backward = 2 * products + 2 * attention
    router = 2 * experts * widths.model * widths.layers
    mask = 2 * widths.ffn * experts * widths.layers
    return (
        Item("teacher forward", run.tokens * forward),
        Item("student forward", run.tokens * forward),
        Item("backward through activations", run.tokens * backward),
        Item("routers and assignment gradient", run.tokens * (3 * router + mask)),
        Item("calibration forward", run.calibration_tokens * forward),
    )
