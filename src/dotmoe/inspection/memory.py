"""What a conversion holds in memory and on disk: estimates from sizes alone, by item.

They are for planning: allocator slack, the framework itself (about 1 GiB on a GPU) and the
operating system come on top.
"""

from dotmoe.granularity import parts_of
from dotmoe.inspection.sizes import FLOAT32, Items, Sizes, Step
from dotmoe.moe.objective import chunk_rows

FFN_TENSORS_IN_BACKWARD = 5
"""Of the width that computes, while the gradient passes one FFN."""
ROWS_IN_BACKWARD = 4
"""Tensors of k rows a token at one moment of an expert layer's backward."""


def step_memory(step: Step) -> Items:
    """Peak of one optimizer step on one GPU, in the backward of a micro-batch."""
    sizes, counts, width = step.sizes, step.sizes.counts, step.sizes.widths.model
    tokens, layers = step.micro_batch_size * step.seq_len, sizes.widths.layers
    stream, layer = sizes.held * width * tokens, kept_per_token(step) * tokens
    kept = layers * stream + layer if step.checkpointing else layers * layer
    weights, working = counts.dense_total, FFN_TENSORS_IN_BACKWARD * step.neurons
    if step.sharded and step.ranks > 1:
        weights = gathered(sizes) + (step.train != "everything") * step.part(weights)
    if step.train == "lora":
        # The sum of an expert's weights and its adapters stays for the layer's backward.
        weights += counts.ffn_total // (layers if step.checkpointing else 1)
    if step.is_alignment:
        own, routers = step.own_affinities, counts.routers
        trained = {
            "affinities, routers, Adam": 3 * FLOAT32 * (own + routers),
            # The plan's gradient is whole on each GPU.
            "soft plan and gradients": FLOAT32 * (own + sizes.affinities + routers),
        }
    else:
        is_divided = step.sharded and step.train == "everything"
        own = step.part(step.trained) if is_divided else step.trained
        trained = {"trained weights in float32, gradients, Adam": 4 * FLOAT32 * own}
        working += ROWS_IN_BACKWARD * sizes.split.active_experts * width
    chunk = _chunk_bytes(step)
    return {
        "dense weights": sizes.held * weights,
        **trained,
        "activations kept for the backward": kept,
        "buffers of one layer, or one chunk of logits": max(sizes.held * working * tokens, chunk),
        "hidden states": (3 if step.is_alignment else 2) * stream,
    }


def gathered(sizes: Sizes) -> int:
    """Sharded parameters that are whole at one moment: this layer and the next, or the head."""
    layers = min(2, sizes.widths.layers) * sizes.layer_parameters
    return max(layers, sizes.widths.vocabulary * sizes.widths.model)


def kept_per_token(step: Step) -> int:
    """Bytes that the backward pass of one layer keeps for each token.

        b * (2 N + 2 (H + H_kv) * head_dim) + 4 * (3 D + 4 E)

    Frozen projections keep nothing of their inputs. In float32: the inputs of both norms and of
    the router, four tensors of router scores, and the inputs of query and key norms if there are.
    In fine-tuning: the N that run, and b * D more. Where experts are trained or adapted, their
    inputs too, b * (N + k * D), and where all weights are, those of attention, b * D again.
    """
    sizes, width = step.sizes, step.sizes.widths.model
    inputs = {"assignment": 0, "everything": 2}.get(step.train, 1)
    trains_experts = step.train in ("everything", "lora")
    inputs += trains_experts * sizes.split.active_experts
    norms = 0 if sizes.traits.qk_norm == "none" else sizes.head_width
    narrow = (2 + trains_experts) * step.neurons + 2 * sizes.head_width + inputs * width
    return sizes.held * narrow + FLOAT32 * (3 * width + 4 * sizes.split.num_experts + norms)


def _chunk_bytes(step: Step) -> int:
    """One chunk of logits in the loss: three tensors in float32, and 16-bit ones themselves."""
    vocabulary, held = step.sizes.widths.vocabulary, step.sizes.held
    rows = chunk_rows(vocabulary, on_cpu=step.on_cpu)
    rows = min(step.micro_batch_size * step.seq_len, rows)
    return rows * vocabulary * (3 * FLOAT32 + held * (held < FLOAT32))


def calibration_memory(sizes: Sizes, tokens: int) -> Items:
    """Peak of the start from data of so many tokens; it is over before alignment begins."""
    widths = sizes.widths
    return {
        "dense weights": sizes.held * sizes.counts.dense_total,
        # FFN inputs of one layer in float64 too.
        "stream and FFN inputs": (2 * sizes.held + 2 * FLOAT32) * widths.model * tokens,
        # Activations, their sizes, and these times the norms of W_down's columns.
        "contributions of one layer": 3 * FLOAT32 * widths.ffn * tokens,
        "affinities and routers": FLOAT32 * (sizes.affinities + sizes.counts.routers),
    }


def repair_memory(sizes: Sizes, tokens: int) -> Items:
    """Peak of a repair on so many tokens; beside a GPU the host holds the second item."""
    trained = 6 * FLOAT32 * 3 * sizes.widths.ffn * sizes.widths.model
    return {
        "dense weights": sizes.held * sizes.counts.dense_total,
        "both streams, FFN inputs and wanted outputs": 4 * sizes.held * sizes.widths.model * tokens,
        "matrices in float64, then one FFN's training": max(
            5 * 2 * FLOAT32 * max(sizes.repaired_inputs) ** 2,
            trained * (sizes.split.target == "ffn"),
        ),
    }


def exported_bytes(sizes: Sizes) -> Items:
    """The exported folder (glm4_moe; with experts made of heads dotmoe)."""
    written, split = sizes.written.itemsize, sizes.split
    tied = 0 if sizes.counts.output_head else sizes.counts.input_embedding
    empty = 0 if split.shared_size else split.expert_size
    zeros = 3 * empty * sizes.widths.model * sizes.moe_layers
    always = {
        "exported weights and routers": written * sizes.counts.stored,
        "tied head written out": written * tied,
    }
    if sizes.has_heads:
        return always
    return always | {
        "zero shared expert of the format": written * zeros,
        "router score biases": FLOAT32 * sizes.moe_layers * split.num_experts,
    }


def disk(sizes: Sizes, tokens: int) -> Items:
    """Bytes on disk of a run that reads so many tokens."""
    trainables = sizes.affinities + sizes.counts.routers
    units = sizes.widths.layers * sum(part.units for part in parts_of(sizes.split))
    return {
        "dense checkpoint (unless it is there)": sizes.stored.itemsize * sizes.counts.dense_total,
        "packed tokens": 4 * tokens,
        # A, routers and both moments; while a new one is written the last one is still there.
        "two alignment checkpoints": 2 * 3 * FLOAT32 * trainables,
        "layout": FLOAT32 * (units + sizes.counts.routers),
        "exported folder": sum(exported_bytes(sizes).values()),
    }
