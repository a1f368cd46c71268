"""What a split or a model runs into: refusals of the export, limits of servers and kernels."""

import torch

from dotmoe.granularity import GROUPED_MATMUL_BYTES, fitting_sizes, next_to
from dotmoe.inspection.memory import exported_bytes
from dotmoe.inspection.sizes import EXPORTED, PAPER_TOKENS, InspectConfig, Sizes, dtype_name
from dotmoe.llama_cpp import most_active_experts_of
from dotmoe.models.family import Multipliers
from dotmoe.tables import in_bytes

FUSED_ROUTING_LIMIT = 32
"""Active experts that fused routing kernels of servers handle."""
MANY_LAYERS = 16
"""From so many on one dense layer costs few parameters; of a model of 5 it did not pay."""
LARGEST_STOCK_EXPERTS = 512
"""Experts a layer of the widest stock MoE models."""


def warnings_for(sizes: Sizes, asked: InspectConfig, rope_type: str) -> list[str]:
    """Sentences about one conversion, what the export would refuse first."""
    split, widths, traits = sizes.split, sizes.widths, sizes.traits
    of_neurons = split.target == "ffn"
    size, experts, active = split.expert_size, split.num_experts, split.active_experts
    only_llama = rope_type in ("llama3", "yarn") or traits.output_bias  # not in gguf_glm4moe
    most = most_active_experts_of(traits, split, widths.layers, 5 if only_llama else 8)
    served = not sizes.has_heads
    window = traits.sliding_window or widths.context
    extra = in_bytes(exported_bytes(sizes)["tied head written out"])
    seen = asked.steps * asked.batch_size * min(asked.seq_len, widths.context)
    is_half = sizes.stored is torch.float16
    exact = "exact, twice the size" if is_half else "rounds the weights"
    on_gpu = " On a GPU, align with --dtype bfloat16 or float32 too." * is_half
    found = {
        f"Export refuses weights stored as {dtype_name(sizes.stored)}. Give --export-dtype "
        f"bfloat16 (rounds the weights; assumed here) or float32 ({exact}).{on_gpu}": (
            asked.export_dtype == "source" and sizes.stored not in EXPORTED
        ),
        "Some heads of attention run per token, which no server can do: the checkpoint runs in "
        "Transformers alone, by code of its own (import dotmoe, or trust_remote_code=True). vLLM, "
        "SGLang and llama.cpp cannot load it, and there is no GGUF of it.": sizes.has_heads,
        **(_refused_widths(sizes) if of_neurons else {}),
        f"{active} experts run per token; llama.cpp runs at most {most} of this model, so a GGUF "
        "of it is refused. Larger experts need fewer.": served and active > most,
        f"{active} experts run per token; fused routing kernels of some servers take at most "
        f"{FUSED_ROUTING_LIMIT} and fall back to slower ones. Larger experts need fewer.": (
            served and active > FUSED_ROUTING_LIMIT
        ),
        f"Experts have {size} neurons, not a multiple of 32: llama.cpp cannot quantise their "
        "down_proj, and GPU kernels pad or slow down. Multiples of 64 are best.": (
            served and size % 32 > 0
        ),
        f"Experts have {size} neurons, not a multiple of 64: GPU kernels pad or slow down.": (
            of_neurons and size % 64 == 32
        ),
        f"A layer has {experts} experts; stock MoE models stop at {LARGEST_STOCK_EXPERTS}, and "
        "servers' kernels are untried beyond. Larger experts make fewer.": (
            experts > LARGEST_STOCK_EXPERTS
        ),
        "SmolLM2-135M kept more with its first layer dense (--first-dense-layers 1) and half of "
        "what runs always on (--shared).": (
            of_neurons
            and widths.layers >= MANY_LAYERS
            and not (split.first_dense_layers and split.shared_size)
            and not (traits.norms_after or traits.output_bias)  # whose formats hold neither
            and traits.multipliers == Multipliers()
        ),
        "The output head is tied to the embedding; servers of the exported format do not tie, so "
        f"it is written out: {extra} more.": sizes.counts.output_head == 0,
        f"Attention slides over {window:,} tokens, which the exported format cannot: its context "
        f"is lowered from {widths.context:,} to {window:,}, exact up to there.": (
            served and window < widths.context
        ),
        f"Sequences are shortened from {asked.seq_len:,} to {widths.context:,} tokens, the "
        "model's context.": asked.seq_len > widths.context,
        f"The run sees {seen:,} tokens; the paper's alignment saw {PAPER_TOKENS:,} (3,500 steps of "
        "64 x 2,048). Expect to lose more quality than it reports.": (
            0 < asked.steps * asked.batch_size * asked.seq_len < PAPER_TOKENS
        ),
    }
    return [sentence for sentence, applies in found.items() if applies]


def _refused_widths(sizes: Sizes) -> dict[str, bool]:
    """Expert size and model width that stock Transformers cannot run, with what it can."""
    size, width = sizes.split.expert_size, sizes.widths.model
    remedy = "No split of this model can be exported. Choose another."
    multiple = 1
    for dtype in (torch.float32, sizes.written):  # the written one has the last word
        multiple = GROUPED_MATMUL_BYTES // dtype.itemsize
        nearest = next_to(size, fitting_sizes(sizes.split.units, multiple))
        fitting = [size] if size % multiple == 0 else nearest
        if width % multiple == 0 and fitting:
            other = " --export-dtype float32" * (dtype is not sizes.written)
            remedy = f"Give --expert-size {' or '.join(map(str, fitting))}{other}."
    return {
        f"Export refuses {what} {value}: in {dtype_name(sizes.written)}, Transformers runs experts "
        f"in multiples of {multiple} only. {remedy}": value % multiple > 0
        for what, value in {"expert size": size, "model width": width}.items()
    }
