"""Expert tensors, the same in every architecture: one tensor of three dimensions a projection."""

from collections.abc import Iterator

from dotmoe.artifacts import DenseModel
from dotmoe.checkpoint.tensors import Tensors
from dotmoe.export.format import Conversion
from dotmoe.export.tensors import PROJECTIONS
from dotmoe.gguf_export.tensor_plan import GgufTensor, carried, down, gate_or_up
from dotmoe.granularity import Granularity
from dotmoe.llama_cpp import most_active_experts_of

MOST_EXPERTS = 1024
"""Limit of llama.cpp as in llama-cpp-python 0.3.36, which ends the process beyond; older ones take
fewer."""


def experts_refusal(granularity: Granularity) -> str | None:
    """Why llama.cpp cannot hold that number of experts (one sentence), or None."""
    num_experts = granularity.num_experts
    if not 2 <= num_experts <= MOST_EXPERTS:
        return (
            f"The layout has {num_experts} experts a layer, but llama.cpp takes 2 to "
            f"{MOST_EXPERTS}. Choose another expert_size."
        )
    return None


def active_experts_refusal(
    dense: DenseModel, granularity: Granularity, moe_tensors: int
) -> str | None:
    """Why llama.cpp cannot run so many experts a token (one sentence), or None.

    Args:
        dense: The dense model.
        granularity: Its split.
        moe_tensors: Tensors of a split FFN.
    """
    traits = dense.family.traits(dense.config)
    most = most_active_experts_of(traits, granularity, dense.widths.layers, moe_tensors)
    if granularity.active_experts <= most:
        return None
    return (
        f"{granularity.active_experts} experts run per token, but llama.cpp's graph has room for "
        f"{most} in a model of this form, and it aborts beyond. Choose --active-experts {most} or "
        "fewer, or larger experts."
    )


def expert_tensors(conversion: Conversion, layer: int) -> Iterator[GgufTensor]:
    """The dense rows and columns, unchanged but stacked by expert."""
    neurons_ES = conversion.layout.neurons_of_expert(layer).cpu()
    for projection in PROJECTIONS:
        make = down if projection == "down" else gate_or_up
        yield make(
            conversion.tensors,
            conversion.dense.family.ffn_tensor(layer, projection),
            f"blk.{layer}.ffn_{projection}_exps.weight",
            neurons_ES,
        )


def dense_ffn_tensors(dense: DenseModel, tensors: Tensors, layer: int) -> Iterator[GgufTensor]:
    """The FFN of a layer that is not split."""
    for projection in PROJECTIONS:
        source = dense.family.ffn_tensor(layer, projection)
        yield carried(tensors, source, f"blk.{layer}.ffn_{projection}.weight", "matrix")
