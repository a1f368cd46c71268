"""What a split or a model runs into: refusals of the export, limits of servers and kernels."""

import torch

from dotmoe.granularity import GROUPED_MATMUL_BYTES, nearest_expert_sizes
from dotmoe.inspection.memory import exported_bytes
from dotmoe.inspection.sizes import (
    EXPORTED,
    PAPER_TOKENS,
    ExportDtype,
    RunSize,
    Sizes,
    dtype_name,
)
from dotmoe.llama_cpp import most_active_experts_of
from dotmoe.tables import in_bytes

FUSED_ROUTING_LIMIT = 32
"""Active experts that fused routing kernels of servers handle."""
LARGEST_STOCK_EXPERTS = 512
"""Experts a layer of the widest stock MoE models."""
NO_SPLIT = "No split of this model can be exported. Choose another."


def warnings_for(sizes: Sizes, asked: RunSize, export_dtype: ExportDtype) -> tuple[str, ...]:
    """Sentences about one conversion, what the export would refuse first.

    Args:
        sizes: Of model and split.
        asked: The run as it was asked for; the context may shorten its sequences.
        export_dtype: Dtype asked for the export.
    """
    found = {
        **_refusals(sizes, export_dtype),
        **_of_split(sizes),
        **_of_model_and_run(sizes, asked),
    }
    return tuple(sentence for sentence, applies in found.items() if applies)


def _refusals(sizes: Sizes, export_dtype: ExportDtype) -> dict[str, bool]:
    name, is_half = dtype_name(sizes.stored), sizes.stored is torch.float16
    exact = "exact, twice the size" if is_half else "rounds the weights"
    on_gpu = " On a GPU, align with --dtype bfloat16 or float32 too." * is_half
    stored = (
        f"Export refuses weights stored as {name}. Give --export-dtype bfloat16 (rounds the "
        f"weights; assumed here) or float32 ({exact}).{on_gpu}"
    )
    found = {stored: export_dtype == "source" and sizes.stored not in EXPORTED}
    multiple, written = GROUPED_MATMUL_BYTES // sizes.written.itemsize, dtype_name(sizes.written)
    size, width = sizes.split.expert_size, sizes.widths.model
    for what, value in {"expert size": size, "model width": width}.items():
        sentence = (
            f"Export refuses {what} {value}: in {written}, Transformers runs experts in multiples "
            f"of {multiple} only. {_remedy(what, sizes)}"
        )
        found[sentence] = bool(value % multiple)
    return found


def _remedy(what: str, sizes: Sizes) -> str:
    """How to come by an expert size and a model width that the export takes."""
    size, width = sizes.split.expert_size, sizes.split.ffn_width
    multiple = GROUPED_MATMUL_BYTES // sizes.written.itemsize
    fitting = nearest_expert_sizes(size, width, multiple=multiple)
    if what == "expert size" and fitting:
        return f"Give --expert-size {' or '.join(map(str, fitting))}."
    multiple = GROUPED_MATMUL_BYTES // torch.float32.itemsize
    if sizes.written is torch.float32 or sizes.widths.model % multiple:
        return NO_SPLIT
    if size % multiple == 0:
        return f"Give --export-dtype float32, which takes multiples of {multiple}."
    fitting = nearest_expert_sizes(size, width, multiple=multiple)
    if not fitting:
        return NO_SPLIT
    return f"Give --export-dtype float32 with --expert-size {' or '.join(map(str, fitting))}."


def _of_split(sizes: Sizes) -> dict[str, bool]:
    split = sizes.split
    size, experts, active = split.expert_size, split.num_experts, split.active_experts
    most = most_active_experts_of(sizes.traits, split, sizes.widths.layers)
    return {
        f"{active} experts run per token; llama.cpp runs at most {most} of this model, so a GGUF "
        "of it is refused. Larger experts need fewer.": active > most,
        f"{active} experts run per token; fused routing kernels of some servers take at most "
        f"{FUSED_ROUTING_LIMIT} and fall back to slower ones. Larger experts need fewer.": active
        > FUSED_ROUTING_LIMIT,
        f"Experts have {size} neurons, not a multiple of 32: llama.cpp cannot quantise their "
        "down_proj, and GPU kernels pad or slow down. Multiples of 64 are best.": size % 32 > 0,
        f"Experts have {size} neurons, not a multiple of 64: GPU kernels pad or slow down.": size
        % 64
        == 32,
        f"A layer has {experts} experts; stock MoE models stop at {LARGEST_STOCK_EXPERTS}, and "
        "servers' kernels are untried beyond. Larger experts make fewer.": experts
        > LARGEST_STOCK_EXPERTS,
    }


def _of_model_and_run(sizes: Sizes, asked: RunSize) -> dict[str, bool]:
    context, window = sizes.widths.context, sizes.traits.sliding_window or sizes.widths.context
    extra = in_bytes(exported_bytes(sizes)["tied head written out"])
    seen = asked.steps * asked.batch_size * min(asked.seq_len, context)
    return {
        "The output head is tied to the embedding; servers of the exported format do not tie, so "
        f"it is written out: {extra} more.": sizes.counts.output_head == 0,
        f"Attention slides over {window:,} tokens, which the exported format cannot: its context "
        f"is lowered from {context:,} to {window:,}, exact up to there.": window < context,
        f"Sequences are shortened from {asked.seq_len:,} to {context:,} tokens, the model's "
        "context.": asked.seq_len > context,
        f"The run sees {seen:,} tokens; the paper's alignment saw {PAPER_TOKENS:,} (3,500 steps of "
        "64 x 2,048). Expect to lose more quality than it reports.": asked.tokens < PAPER_TOKENS,
    }
