"""Sizes of a model and of a step, and what a conversion holds in memory and on disk.

Bytes are for planning: allocator slack, the framework itself (about 1 GiB on a GPU) and the
operating system come on top.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from dotmoe.common.numbers import ceil_div
from dotmoe.export.parameters import count_parameters
from dotmoe.method.config import FinetuneConfig, Train
from dotmoe.method.granularity import Splits, targets_of
from dotmoe.method.losses import chunk_rows
from dotmoe.models.family import family_of
from dotmoe.models.hf_config import widths_of
from dotmoe.models.stream import TOKENS_AT_ONCE
from dotmoe.models.targets import TARGETS
from dotmoe.text.expected import Writing

Items = Mapping[str, int]
"""Numbers of bytes, by what they hold."""

FLOAT32 = 4
STREAMS = "residual streams, and what a repair keeps beside them"
"""The item of a stage's memory that is on the host if the model is on a GPU."""
FFN_TENSORS_IN_BACKWARD = 5
"""Number of tensors as wide as the neurons that compute, while the gradient passes one FFN."""
ROWS_IN_BACKWARD = 4
"""Number of tensors of k rows per token at one moment of an expert layer's backward."""


class Sizes:
    """The sizes of a model and its splits that the estimates use.

    Of the model only shapes are read. `stored` is the dtype of the dense checkpoint, `written` that
    of the exported one.
    """

    def __init__(
        self, model: nn.Module, splits: Splits, *, stored: torch.dtype, written: torch.dtype
    ) -> None:
        config: Any = model.config
        family = family_of(config)
        self.config = config
        self.splits = splits
        self.stored = stored
        self.written = written
        self.split = splits[0]
        """The first split: of FFNs, if they are split."""
        self.widths = widths_of(config)
        self.traits = family.traits(model)
        self.counts = counts = count_parameters(model, family, splits)
        self.queries: int = config.num_attention_heads * self.traits.head_dim
        """Number of entries of a token's queries in one layer."""
        self.head_width: int = self.queries + config.num_key_value_heads * self.traits.head_dim
        """Number of entries of a token's queries and keys in one layer."""
        self.moe_layers = self.widths.layers - self.split.first_dense_layers
        self.affinities_of_a_layer = sum(split.units * split.columns for split in splits)
        """Number of entries of A, over all targets, in a layer that is split."""
        self.affinities = self.moe_layers * self.affinities_of_a_layer
        self.repaired_inputs = [TARGETS[split.target].inputs(config) for split in splits]
        """Numbers of inputs of the projections that a repair refits: W_down, W_O or both."""
        self.repaired = self.moe_layers * self.widths.model * sum(self.repaired_inputs)
        """Number of weights of these projections."""
        self.has_heads = targets_of(splits) != "ffn"
        # The last norm, of the model width, belongs to no layer.
        in_layers = counts.attention_and_norms - self.widths.model + counts.ffn_total
        self.layer_parameters = in_layers // self.widths.layers
        """Number of parameters of one decoder layer: attention, norms, FFN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One optimizer step of alignment or finetuning, on one of the GPUs that share it.

    Sharded weights are divided as by FSDP2: every tensor by rows, and a layer is whole only while
    it runs. Affinities and their Adam moments are always divided by layer; routers are small and
    whole everywhere.
    """

    sizes: Sizes
    batch_size: int
    """Sequences per step, over all GPUs."""
    seq_len: int
    micro_batch_size: int = 1
    """Sequences in memory at once on each GPU."""
    weight_bytes: Literal[2, 4] = 2
    """Bytes of a dense weight in memory."""
    train: Literal["assignment"] | Train = "assignment"
    """`assignment`: an alignment, with a teacher, all experts running and dense weights frozen."""
    distils: bool = False
    """Whether it follows the dense model; an alignment always does."""
    on_cpu: bool = False
    checkpointing: bool = False
    """Keep only each layer's input, and compute the layer again in the backward."""
    ranks: int = 1
    """Number of GPUs."""
    sharded: bool = False
    """Each GPU keeps a part of every dense weight."""
    offload: bool = False
    """Weights, gradients and moments of a finetuning are on the host, in this GPU's part."""
    memory_bytes: int = 0
    """Bytes of a GPU's memory, to which chunks of logits are fitted; 0: the smallest chunks."""

    @property
    def tokens(self) -> int:
        """Tokens per step, over all GPUs."""
        return self.batch_size * self.seq_len

    @property
    def is_alignment(self) -> bool:
        """Whether the step learns assignment and routers, from a teacher."""
        return self.train == "assignment"

    @property
    def trains_weights(self) -> bool:
        """Whether it trains dense weights themselves, all or those of the experts."""
        return self.train in ("everything", "experts")

    @property
    def can_offload(self) -> bool:
        """Whether what is trained may stay in the memory of the host."""
        return self.trains_weights and not self.on_cpu

    @property
    def has_teacher(self) -> bool:
        """Whether the dense model runs on the same tokens."""
        return self.is_alignment or self.distils

    @property
    def logits_at_once(self) -> int:
        """Number of tokens whose logits are in memory at once."""
        vocabulary = self.sizes.widths.vocabulary
        return chunk_rows(vocabulary, on_cpu=self.on_cpu, memory_bytes=self.memory_bytes)

    @property
    def neurons(self) -> int:
        """Number of neurons of an FFN that compute for a token."""
        split = self.sizes.split
        all_run = self.is_alignment or split.target == "attention"
        return self.sizes.widths.ffn if all_run else split.active_units

    @property
    def own_affinities(self) -> int:
        """Number of entries of A on this GPU, [L / ranks, N, E], with L / ranks rounded up."""
        return self.part(self.sizes.moe_layers) * self.sizes.affinities_of_a_layer

    @property
    def trained(self) -> int:
        """Number of parameters that finetuning trains, on all GPUs together.

        An adapter of a projection from a to b has rank * (a + b) entries; all projections of
        attention have one, and each expert's three.
        """
        sizes, split, width = self.sizes, self.sizes.split, self.sizes.widths.model
        if self.train == "everything":
            return sizes.counts.stored
        if self.train == "experts":
            return sizes.counts.routers + 3 * sizes.moe_layers * sizes.widths.ffn * width
        entries = sizes.widths.layers * (4 * width + 2 * sizes.head_width)
        entries += sizes.moe_layers * 3 * split.num_experts * (width + split.expert_size)
        return sizes.counts.routers + FinetuneConfig().lora_rank * entries

    @property
    def on_host(self) -> int:
        """Bytes that one GPU's part of a training takes on the host."""
        if not self.offload:
            return 0
        frozen = self.weight_bytes * self.part(self.sizes.counts.stored - self.trained)
        return 4 * FLOAT32 * self.part(self.trained) + frozen

    def own_part(self, number: int) -> int:
        """How many of `number` items one GPU holds: its part if they are sharded, else all."""
        return self.part(number) if self.sharded else number

    def part(self, number: int) -> int:
        """The part of `number` items on one GPU, rounded up."""
        return ceil_div(number, self.ranks)


def step_memory(step: Step) -> Items:
    """Peak memory of one optimizer step on one GPU, in the backward of a micro-batch or at its end.

    `tests/inspection/test_simulated_memory.py` compares it with the step itself on fake tensors.
    """
    sizes, counts, width = step.sizes, step.sizes.counts, step.sizes.widths.model
    layers = sizes.widths.layers
    tokens = step.micro_batch_size * step.seq_len
    stream = step.weight_bytes * width * tokens
    layer = kept_per_token(step) * tokens
    kept = layers * layer
    if step.checkpointing:
        kept = layers * stream + layer  # inputs of all layers, and the one that is recomputed
    trained = _training_state(step)
    working = FFN_TENSORS_IN_BACKWARD * step.neurons
    if not step.is_alignment:
        working += ROWS_IN_BACKWARD * sizes.split.active_experts * width
    buffers = max(step.weight_bytes * working * tokens, _chunk_of_logits(step, tokens))
    peak = {
        "dense weights": step.weight_bytes * _weights_in_memory(step),
        **trained,
        "activations kept for the backward": kept,
        "buffers of one layer, or one chunk of logits": buffers,
        "hidden states": 3 * stream if step.has_teacher else 2 * stream,
    }
    if step.train == "everything" and step.weight_bytes < FLOAT32:
        # At the end of the backward FSDP sums the gradients of embedding and head in float32.
        ends = counts.input_embedding + counts.output_head
        gradients = (step.weight_bytes + FLOAT32) * ends + FLOAT32 * step.own_part(ends)
        last = {
            "dense weights": step.weight_bytes * ends,
            **{name: trained[name] for name in trained if name != "gradient of the head"},
            "gradients of embedding and head": gradients,
        }
        return max(peak, last, key=lambda items: sum(items.values()))
    return peak


def _weights_in_memory(step: Step) -> int:
    """Number of dense weights in the step's dtype on one GPU, with those gathered at one moment."""
    sizes, counts, layers = step.sizes, step.sizes.counts, step.sizes.widths.layers
    is_divided = step.sharded and step.ranks > 1
    weights = step.part(counts.dense_total) if is_divided else counts.dense_total
    if not step.is_alignment and (step.weight_bytes < FLOAT32 or step.offload):
        # Cast layer by layer, as if gathered; embedding and head stay to the end of the step.
        in_layers = min(2, layers) * sizes.layer_parameters
        cast = in_layers + counts.input_embedding + counts.output_head
        if step.offload:
            weights = cast
        else:
            in_float32 = step.trained - counts.routers if step.trains_weights else 0
            weights += cast - step.own_part(in_float32)
    elif is_divided:
        weights += gathered_parameters(sizes)
    if step.train == "lora":
        # The sum of an expert's weights and its adapters stays for the layer's backward.
        of_a_layer = counts.ffn_total // layers
        weights += of_a_layer if step.checkpointing else counts.ffn_total
    return weights


def _training_state(step: Step) -> dict[str, int]:
    """Bytes of what is trained, its gradients and moments, and of a teacher, on one GPU."""
    sizes, counts = step.sizes, step.sizes.counts
    if step.is_alignment:
        own, routers = step.own_affinities, counts.routers
        return {
            "affinities, routers, Adam": 3 * FLOAT32 * (own + routers),
            # The plan's gradient is whole on each GPU.
            "soft plan and gradients": FLOAT32 * (own + sizes.affinities + routers),
        }
    own = step.trained
    if step.offload:
        own = 0
    elif step.sharded and step.trains_weights:
        own = step.part(step.trained)
    trained = {"trained weights in float32, gradients, Adam": 4 * FLOAT32 * own}
    if step.distils and step.trains_weights:  # else the student itself teaches
        trained["teacher"] = step.weight_bytes * step.own_part(counts.dense_total)
    if step.train == "everything":
        matrix = sizes.widths.vocabulary * sizes.widths.model
        trained["gradient of the head"] = step.weight_bytes * matrix
    return trained


def _chunk_of_logits(step: Step, tokens: int) -> int:
    """Bytes of one chunk: three tensors in float32, and the logits themselves if in 16 bits."""
    widths = step.sizes.widths
    of_a_logit = 3 * FLOAT32 if step.weight_bytes == FLOAT32 else 3 * FLOAT32 + step.weight_bytes
    rows = min(tokens, step.logits_at_once)
    chunk = rows * widths.vocabulary * of_a_logit
    if step.train == "everything":  # the gradient of the head in float32, and what a chunk adds
        chunk += (2 * FLOAT32 - step.weight_bytes) * widths.vocabulary * widths.model
    return chunk


def gathered_parameters(sizes: Sizes) -> int:
    """Number of sharded parameters whole at one moment: a layer, and the next or the embedding."""
    # FSDP2 gathers the embedding after the first layer's backward, even if it is frozen.
    embedding = sizes.widths.vocabulary * sizes.widths.model
    return sizes.layer_parameters + max(sizes.layer_parameters, embedding)


def kept_per_token(step: Step) -> int:
    """Bytes that the backward pass of one layer keeps for each token.

        b * (2 N + 2 (H + H_kv) * head_dim) + 4 * (3 D + 4 E)

    Frozen projections keep none of their inputs. In float32: the inputs of both norms and of the
    router, four tensors of router scores, and the inputs of query and key norms if there are any.
    In finetuning N counts only neurons that run, and b * D and the experts' inputs are added,
    b * (N + k * D); if all weights are trained, attention's too, b * D.
    """
    sizes, width = step.sizes, step.sizes.widths.model
    inputs = {"assignment": 0, "everything": 2}.get(step.train, 1)
    of_neurons = 2
    if not step.is_alignment:
        inputs += sizes.split.active_experts
        of_neurons = 3
    norms = 0 if sizes.traits.qk_norm == "none" else sizes.head_width
    narrow = of_neurons * step.neurons + 2 * sizes.head_width + inputs * width
    return step.weight_bytes * narrow + FLOAT32 * (3 * width + 4 * sizes.split.num_experts + norms)


def answers_memory(sizes: Sizes, writing: Sequence[Writing], weight_bytes: int) -> Items:
    """Peak memory while the dense model writes: keys and values of a whole batch, and its logits.

    A layer's keys and values are copied when a token is added to them.
    """
    layers = sizes.widths.layers
    rows = max(min(each.rows, each.texts) for each in writing)
    longest = max(each.read + each.longest for each in writing)
    of_a_layer = 2 * (sizes.head_width - sizes.queries) * rows * longest
    return {
        "dense weights": weight_bytes * sizes.counts.dense_total,
        "keys and values": weight_bytes * (layers + 1) * of_a_layer,
        "logits": 2 * weight_bytes * sizes.widths.vocabulary * rows,
    }


def calibration_memory(sizes: Sizes, tokens: int, weight_bytes: int) -> Items:
    """Peak memory of the start from data on `tokens` tokens."""
    widths = sizes.widths
    at_once = min(tokens, TOKENS_AT_ONCE)
    return {
        "dense weights": weight_bytes * sizes.counts.dense_total,
        STREAMS: weight_bytes * widths.model * tokens,
        # Held in float64, too.
        "FFN inputs of one layer": (weight_bytes + 2 * FLOAT32) * widths.model * tokens,
        # And for the tokens at work the activations, their factors and their absolute values.
        "contributions of one layer": FLOAT32 * widths.ffn * (tokens + 4 * at_once),
        "affinities and routers": FLOAT32 * (sizes.affinities + sizes.counts.routers),
    }


def repair_memory(sizes: Sizes, tokens: int, weight_bytes: int) -> Items:
    """Peak memory of a repair on `tokens` tokens."""
    widths = sizes.widths
    trained = 0
    if sizes.split.target == "ffn":
        trained = 6 * FLOAT32 * 3 * widths.ffn * widths.model
    matrices = 5 * 2 * FLOAT32 * max(sizes.repaired_inputs) ** 2
    return {
        "dense weights": weight_bytes * sizes.counts.dense_total,
        STREAMS: 4 * weight_bytes * widths.model * tokens,
        "matrices in float64, then one FFN's training": max(matrices, trained),
    }


def export_memory(sizes: Sizes, tokens: int, weight_bytes: int) -> Items:
    """Peak memory of an export that is verified on `tokens` tokens."""
    widths = sizes.widths
    return {
        "dense weights": weight_bytes * sizes.counts.dense_total,
        "a layer or the head": FLOAT32
        * max(2 * sizes.layer_parameters, widths.vocabulary * widths.model),
        "logits": 5 * FLOAT32 * widths.vocabulary * tokens,
    }


def evaluation_memory(sizes: Sizes, weight_bytes: int) -> Items:
    """Weights in memory while perplexity is measured: the dense model's are dropped before."""
    exported = sum(exported_bytes(sizes).values())
    weights = exported // sizes.written.itemsize
    return {"exported weights": weight_bytes * weights}


def exported_bytes(sizes: Sizes) -> Items:
    """Bytes of the exported folder (glm4_moe, or dotmoe for experts made of heads)."""
    split = sizes.split
    written = sizes.written.itemsize
    tied = 0 if sizes.counts.output_head else sizes.counts.input_embedding
    always = {
        "exported weights and routers": written * sizes.counts.stored,
        "tied head written out": written * tied,
    }
    if sizes.has_heads:
        return always
    empty = 0 if split.shared_size else split.expert_size
    zeros = 3 * empty * sizes.widths.model * sizes.moe_layers
    return always | {
        "zero shared expert of the format": written * zeros,
        "router score biases": FLOAT32 * sizes.moe_layers * split.num_experts,
    }
