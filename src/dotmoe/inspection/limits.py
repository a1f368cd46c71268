"""What a split or a model runs into: refusals of the export, limits of servers and kernels."""

import torch

from dotmoe.granularity import GROUPED_MATMUL_BYTES, nearest_expert_sizes
from dotmoe.inspection.costs import exported_bytes
from dotmoe.inspection.dtypes import EXPORTED, ExportDtype, dtype_name
from dotmoe.inspection.sizes import PAPER_TOKENS, RunSize, Sizes
from dotmoe.inspection.units import in_bytes
from dotmoe.llama_cpp import most_active_experts_of

FUSED_ROUTING_LIMIT = 32
"""Active experts that fused routing kernels of servers handle."""
LARGEST_STOCK_EXPERTS = 512
"""Experts a layer of the widest stock MoE models."""


def warnings_for(sizes: Sizes, asked: RunSize, export_dtype: ExportDtype) -> tuple[str, ...]:
    """Sentences about one conversion, what the export would refuse first.

    Args:
        sizes: Of model and split.
        asked: The run as it was asked for; the context may shorten its sequences.
        export_dtype: Dtype asked for the export.
    """
    found = [*_export_refusals(sizes, export_dtype), *_split_warnings(sizes)]
    return (*found, *_model_warnings(sizes), *_run_warnings(sizes, asked))


def _export_refusals(sizes: Sizes, export_dtype: ExportDtype) -> list[str]:
    warnings = []
    if export_dtype == "source" and sizes.stored not in EXPORTED:
        name = dtype_name(sizes.stored)
        exact = "exact, twice the size" if sizes.stored is torch.float16 else "rounds the weights"
        on_gpu = " On a GPU, align with --dtype bfloat16 or float32 too."
        warnings.append(
            f"Export refuses weights stored as {name}. Give --export-dtype bfloat16 (rounds the "
            f"weights; assumed here) or float32 ({exact})."
            + (on_gpu if sizes.stored is torch.float16 else "")
        )
    for what, size in (
        ("expert size", sizes.granularity.expert_size),
        ("model width", sizes.widths.model),
    ):
        multiple = GROUPED_MATMUL_BYTES // sizes.written.itemsize
        if size % multiple:
            warnings.append(
                f"Export refuses {what} {size}: in {dtype_name(sizes.written)}, Transformers runs "
                f"experts in multiples of {multiple} only. {_remedy(what, sizes)}"
            )
    return warnings


def _remedy(what: str, sizes: Sizes) -> str:
    """How to come by an expert size and a model width that the export takes."""
    multiple = GROUPED_MATMUL_BYTES // sizes.written.itemsize
    size, width = sizes.granularity.expert_size, sizes.granularity.ffn_width
    fitting = nearest_expert_sizes(size, width, multiple=multiple)
    if what == "expert size" and fitting:
        return f"Give --expert-size {' or '.join(str(n) for n in fitting)}."
    multiple = GROUPED_MATMUL_BYTES // torch.float32.itemsize
    if sizes.written is torch.float32 or sizes.widths.model % multiple:
        return "No split of this model can be exported. Choose another."
    if size % multiple == 0:
        return f"Give --export-dtype float32, which takes multiples of {multiple}."
    fitting = nearest_expert_sizes(size, width, multiple=multiple)
    if not fitting:
        return "No split of this model can be exported. Choose another."
    sizes_text = " or ".join(str(n) for n in fitting)
    return f"Give --export-dtype float32 with --expert-size {sizes_text}."


def _split_warnings(sizes: Sizes) -> list[str]:
    warnings, split = [], sizes.granularity
    size, experts, active = split.expert_size, split.num_experts, split.active_experts
    most = most_active_experts_of(sizes.traits, split, sizes.widths.layers)
    if active > most:
        warnings.append(
            f"{active} experts run per token; llama.cpp runs at most {most} of this model, so a "
            "GGUF of it is refused. Larger experts need fewer."
        )
    if active > FUSED_ROUTING_LIMIT:
        warnings.append(
            f"{active} experts run per token; fused routing kernels of some servers take at most "
            f"{FUSED_ROUTING_LIMIT} and fall back to slower ones. Larger experts need fewer."
        )
    if size % 32:
        warnings.append(
            f"Experts have {size} neurons, not a multiple of 32: llama.cpp cannot quantise their "
            "down_proj, and GPU kernels pad or slow down. Multiples of 64 are best."
        )
    elif size % 64:
        warnings.append(
            f"Experts have {size} neurons, not a multiple of 64: GPU kernels pad or slow down."
        )
    if experts > LARGEST_STOCK_EXPERTS:
        warnings.append(
            f"A layer has {experts} experts; stock MoE models stop at {LARGEST_STOCK_EXPERTS}, and "
            "servers' kernels are untried beyond. Larger experts make fewer."
        )
    return warnings


def _model_warnings(sizes: Sizes) -> list[str]:
    warnings = []
    if sizes.counts.output_head == 0:
        extra = next(i.amount for i in exported_bytes(sizes) if i.name == "tied head written out")
        warnings.append(
            "The output head is tied to the embedding; servers of the exported format do not tie, "
            f"so it is written out: {in_bytes(extra)} more."
        )
    window = sizes.traits.sliding_window
    if window is not None and window < sizes.widths.context:
        warnings.append(
            f"Attention slides over {window:,} tokens, which the exported format cannot: its "
            f"context is lowered from {sizes.widths.context:,} to {window:,}, exact up to there."
        )
    return warnings


def _run_warnings(sizes: Sizes, asked: RunSize) -> list[str]:
    warnings = []
    context = sizes.widths.context
    if asked.seq_len > context:
        warnings.append(
            f"Sequences are shortened from {asked.seq_len:,} to {context:,} tokens, the model's "
            "context."
        )
    if asked.tokens < PAPER_TOKENS:
        seen = asked.steps * asked.batch_size * min(asked.seq_len, context)
        warnings.append(
            f"The run sees {seen:,} tokens; the paper's alignment saw {PAPER_TOKENS:,} "
            "(3,500 steps of 64 x 2,048). Expect to lose more quality than it reports."
        )
    return warnings
