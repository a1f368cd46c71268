"""What a conversion holds in memory and on disk: estimates from sizes alone, by item.

They are for planning: allocator slack, the framework itself (about 1 GiB on a GPU) and the
operating system come on top.
"""

from dataclasses import dataclass

from dotmoe.inspection.sizes import FLOAT32, FinetuneSize, Items, RunSize, Sizes
from dotmoe.moe.losses import chunk_rows

TRAINABLE_BYTES = 3 * FLOAT32
"""Value and two Adam moments; there between steps too."""
MASTER_BYTES = 4 * FLOAT32
"""Of a trained weight: float32 value, gradient, and two Adam moments."""
UPDATE_COPIES = 3
"""Of the affinities, while their gradient is formed from the plan's and while Adam uses it."""
HEAD_CHUNK_COPIES = 3
"""Float32 tensors of one chunk of logits that live at the same time in the distillation loss."""
FFN_TENSORS_IN_BACKWARD = 5
"""Of width N, while the gradient passes one FFN."""
ROWS_IN_BACKWARD = 4
"""Tensors of k rows a token at one moment of an expert layer's backward."""
GATHERED_LAYERS = 2
"""Sharded decoder layers that are whole at one moment: the one that runs, and the next one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Over how many GPUs a model lies.

    The frozen weights are whole on every GPU, or sharded as FSDP2 does it: every tensor by rows,
    and a layer whole only while it runs. Affinities and their Adam moments are always divided by
    layer; routers are small and whole everywhere.
    """

    ranks: int = 1
    """GPUs of all nodes."""
    sharded: bool = False
    """Each GPU keeps a part of every dense weight."""

    def part(self, parameters: int) -> int:
        """The part of so many parameters on one GPU; where they do not divide, the largest."""
        return -(-parameters // self.ranks)


ALONE = Placement()


def gathered_parameters(sizes: Sizes) -> int:
    """Sharded parameters that are whole at one moment: two layers, or the head's matrix."""
    layers = min(GATHERED_LAYERS, sizes.widths.layers) * sizes.layer_parameters
    return max(layers, sizes.widths.vocabulary * sizes.widths.model)


def frozen_bytes(sizes: Sizes, placement: Placement) -> int:
    """Bytes of dense weights on one GPU, what is gathered for a moment included."""
    parameters = sizes.counts.dense_total
    if placement.sharded and placement.ranks > 1:
        parameters = placement.part(parameters) + gathered_parameters(sizes)
    return sizes.held * parameters


def affinity_entries(sizes: Sizes, placement: Placement) -> int:
    """Entries of A on one GPU, [L / ranks, N, E]; where layers do not divide, the most."""
    return placement.part(sizes.moe_layers) * sizes.widths.ffn * sizes.split.num_experts


def kept_per_token(sizes: Sizes, size: FinetuneSize | None = None) -> int:
    """Bytes that the backward pass of one layer keeps for each token.

        b * (2 N + 2 (H + H_kv) * head_dim) + 4 * (3 D + 4 E)

    Frozen projections keep nothing of their inputs. In float32: the inputs of both norms and of
    the router, four tensors of router scores, and the inputs of query and key norms if there are.
    With `size`, of fine-tuning: the N that run, and b * D more; where all weights are trained, the
    inputs of attention too, b * D again.
    """
    width = sizes.widths.model
    neurons = sizes.widths.ffn if size is None else sizes.split.active_neurons
    inputs = 0 if size is None else 1 + (size.train == "everything")
    narrow = 2 * neurons + 2 * sizes.head_width + inputs * width
    wide = 3 * width + 4 * sizes.split.num_experts + sizes.head_norms
    return sizes.held * narrow + FLOAT32 * wide


def _activations(
    sizes: Sizes, run: RunSize, size: FinetuneSize | None, *, checkpointing: bool
) -> tuple[int, int]:
    """Bytes kept for the backward, and those of the hidden states of one model."""
    tokens, layers = run.micro_batch_size * run.seq_len, sizes.widths.layers
    layer, stream = kept_per_token(sizes, size) * tokens, sizes.held * sizes.widths.model * tokens
    return (layers * stream + layer if checkpointing else layers * layer), stream


def _head_bytes(sizes: Sizes, run: RunSize) -> int:
    """Buffers of the distillation loss for one chunk of tokens."""
    vocabulary = sizes.widths.vocabulary
    rows = chunk_rows(vocabulary, on_cpu=run.device == "cpu")
    rounded = sizes.held if sizes.held < FLOAT32 else 0
    rows = min(run.micro_batch_size * run.seq_len, rows)
    return rows * vocabulary * (HEAD_CHUNK_COPIES * FLOAT32 + rounded)


def alignment_memory(
    sizes: Sizes, run: RunSize, placement: Placement = ALONE, *, checkpointing: bool
) -> Items:
    """Peak of one alignment step on one device: what is there at that moment.

    It comes in the forward and backward pass of a micro-batch, or, where the affinities are larger
    than all activations, in their update. From the second micro-batch of a step on, the gradients
    that the first has left are there too.

    Args:
        sizes: Of model and split.
        run: Of the micro batch; the device decides how large a chunk of logits is.
        placement: Among how many devices; each has the plan's gradient whole and the rest of the
            affinities by layer.
        checkpointing: Keep only each layer's input, and compute the layer again in the backward.
    """
    tokens = run.micro_batch_size * run.seq_len
    kept, stream = _activations(sizes, run, None, checkpointing=checkpointing)
    working = FFN_TENSORS_IN_BACKWARD * sizes.held * sizes.widths.ffn * tokens
    own = affinity_entries(sizes, placement)
    plan, gradients = FLOAT32 * own, FLOAT32 * (sizes.affinities + sizes.counts.routers)
    earlier = gradients if run.batch_size > placement.ranks * run.micro_batch_size else 0
    passes = (plan + earlier, kept, max(working, _head_bytes(sizes, run)), 3 * stream)
    whole = gradients if placement.ranks > 1 else 0
    peak = max(passes, (whole + UPDATE_COPIES * plan, 0, 0, 0), key=sum)
    return {
        "dense weights, one copy": frozen_bytes(sizes, placement),
        "affinities, routers, Adam": TRAINABLE_BYTES * (own + sizes.counts.routers),
        "soft plan and gradients": peak[0],
        "activations kept for the backward": peak[1],
        "buffers of one layer, or one chunk of logits": peak[2],
        "hidden states of teacher and student": peak[3],
    }


def finetune_memory(
    sizes: Sizes,
    run: RunSize,
    placement: Placement = ALONE,
    *,
    size: FinetuneSize,
    checkpointing: bool,
) -> Items:
    """Peak of one fine-tuning step on one GPU.

    Trained weights are float32 with a copy for the products, whole or gathered; where all are
    trained and sharded, no weight is whole for longer than it computes.
    """
    split, held, trained = sizes.split, sizes.held, sizes.trained(size)
    kept, stream = _activations(sizes, run, size, checkpointing=checkpointing)
    rows = ROWS_IN_BACKWARD * split.active_experts * sizes.widths.model
    neurons = FFN_TENSORS_IN_BACKWARD * split.active_neurons
    working = held * run.micro_batch_size * run.seq_len * (rows + neurons)
    weights, states = frozen_bytes(sizes, placement), MASTER_BYTES * trained
    if size.train == "lora":
        # The sum of an expert's weights and its adapters stays for the layer's backward.
        layers = 1 if checkpointing else sizes.widths.layers
        weights += held * sizes.counts.ffn_total // sizes.widths.layers * layers
    elif size.train == "everything" and placement.sharded and placement.ranks > 1:
        # The gradient of a layer is whole until it is reduced.
        weights = held * gathered_parameters(sizes) + FLOAT32 * sizes.layer_parameters
        states = MASTER_BYTES * placement.part(trained)
    return {
        "weights that compute": weights,
        "trained weights, gradients, Adam": states,
        "activations kept for the backward": kept,
        "buffers of one layer, or one chunk of logits": max(working, _head_bytes(sizes, run)),
        "hidden states": 2 * stream,
    }


def calibration_memory(sizes: Sizes, run: RunSize) -> Items:
    """Peak of the start from data; it is over before alignment begins."""
    widths, tokens = sizes.widths, run.calibration_tokens
    return {
        "dense weights": sizes.held * sizes.counts.dense_total,
        "FFN inputs of all layers": sizes.held * widths.layers * widths.model * tokens,
        # Contributions, the same centred, and as unit vectors.
        "contributions of one layer": 3 * FLOAT32 * widths.ffn * tokens,
        "affinities and routers": FLOAT32 * (sizes.affinities + sizes.counts.routers),
    }


def exported_bytes(sizes: Sizes) -> Items:
    """The exported folder (glm4_moe)."""
    written, split = sizes.written.itemsize, sizes.split
    tied = 0 if sizes.counts.output_head else sizes.counts.input_embedding
    zeros = 3 * split.expert_size * sizes.widths.model * sizes.moe_layers
    return {
        "exported weights and routers": written * sizes.counts.stored,
        "tied head written out": written * tied,
        "zero shared expert of the format": written * zeros,
        "router score biases": FLOAT32 * sizes.moe_layers * split.num_experts,
    }


def export_memory(sizes: Sizes, *, max_shard_bytes: int = 4 << 30) -> Items:
    """Peak of the export with its verification, which reloads the result beside the dense model."""
    exported = sum(exported_bytes(sizes).values())
    return {
        "dense weights": sizes.held * sizes.counts.dense_total,
        "exported model, reloaded to verify": exported,
        "one shard at most": min(exported, max_shard_bytes),
    }


def disk(sizes: Sizes, run: RunSize) -> Items:
    """Bytes on disk."""
    trainables = sizes.affinities + sizes.counts.routers
    assignment = sizes.widths.layers * sizes.widths.ffn
    return {
        "dense checkpoint (unless it is there)": sizes.stored.itemsize * sizes.counts.dense_total,
        "packed tokens": 4 * (run.tokens + run.calibration_tokens),
        # A, routers and both moments; while a new one is written the last one is still there.
        "two alignment checkpoints": 2 * TRAINABLE_BYTES * trainables,
        "layout": FLOAT32 * (assignment + sizes.counts.routers),
        "exported folder": sum(exported_bytes(sizes).values()),
    }
