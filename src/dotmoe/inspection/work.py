"""The arithmetic and the memory traffic of one alignment step on one GPU, part by part.

A part takes products of matrices, attention, and bytes that operations without products read and
write; these are counted, and `step_time` turns them into seconds. The bytes are those of
Transformers' operations run one by one, each reading its inputs and writing its output.
"""

from dataclasses import dataclass

from dotmoe.inspection.placement import ALONE, Placement, affinity_entries
from dotmoe.inspection.sizes import RunSize, Sizes

FLOAT32 = 4
NORM_BYTES = {2: 36, 4: 28}
"""Per entry of an RMSNorm's input, by the bytes of a weight; the norm itself is in float32."""
NORM_BACKWARD_BYTES = {2: 87, 4: 86}
"""The same, backward."""
RESIDUAL_PASSES, RESIDUAL_BACKWARD_PASSES = 3, 4
ROTARY_PASSES, ROTARY_BACKWARD_PASSES = 10, 16
"""Over queries and keys: two products, a half turned and a sum; heads put together."""
GATED_PASSES = 5
"""SiLU(gate) * up of the dense FFN, over the width N."""
MASKED_PASSES, MASKED_BACKWARD_PASSES = 9, 21
"""The same under the mask, in PyTorch's own operations; 10 bytes more where sums are widened."""
KERNEL_PASSES, KERNEL_BACKWARD_PASSES = 3, 8
"""The same in the Triton kernel of a GPU, and two products that read the gradient of the mask."""
ROUTER_BYTES, ROUTER_BACKWARD_BYTES = 330, 82
"""Per router logit: top-k, its surrogate, which is found by bisection, and both losses."""
PLAN_BYTES = 42
"""Per entry of the plan and micro-batch: its gradient is formed and added up."""
LOGIT_BYTES = {2: 118, 4: 100}
"""Per token and word of the vocabulary, in the losses of both models and their gradient."""
ASSIGNMENT_BYTES, NEWTON_STEPS = 200, 3
"""Per entry of A and step: passes of Newton's method, rounding and implicit gradient."""
ADAM_BYTES = 40
"""Per trainable entry: clipping reads the gradient twice; AdamW reads four and writes three."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one part of a step consists of."""

    part: str
    products: int = 0
    """FLOP of matrix products."""
    attention: int = 0
    """FLOP of attention scores and their weighted sums."""
    moved: int = 0
    """Bytes read and written by operations without products."""
    logits: int = 0
    """The same, by the softmaxes over the vocabulary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What of one step falls to one GPU."""

    tokens: int
    micro_batches: int


def share_of(run: RunSize, placement: Placement) -> Share:
    """Sequences of a batch are dealt out evenly; where they do not divide, the most of a GPU."""
    sequences = -(-run.batch_size // placement.ranks)
    return Share(
        tokens=sequences * run.seq_len, micro_batches=-(-sequences // run.micro_batch_size)
    )


def forward_products(sizes: Sizes) -> int:
    """FLOP a token of the decoder layers' products; the head is apart."""
    return 2 * (sizes.counts.attention_and_norms + sizes.counts.ffn_total)


def attention_flops(sizes: Sizes, seq_len: int) -> int:
    """FLOP a token of causal attention, forward, all layers."""
    return 2 * seq_len * sizes.heads * sizes.traits.head_dim * sizes.widths.layers


def dense_bytes(sizes: Sizes, *, neurons: int) -> int:
    """Bytes a token that one dense layer's forward moves; its FFN has so many neurons."""
    held, width = sizes.bytes_held, sizes.widths.model
    heads = (sizes.heads + sizes.kv_heads) * sizes.traits.head_dim
    norms = 2 * width + (heads if sizes.traits.qk_norm != "none" else 0)
    rest = 2 * RESIDUAL_PASSES * width + ROTARY_PASSES * heads + GATED_PASSES * neurons
    return NORM_BYTES[held] * norms + held * rest


def backward_bytes(sizes: Sizes, *, ffn: int) -> int:
    """Bytes a token that one layer's backward moves, its FFN moving `ffn`."""
    held, width = sizes.bytes_held, sizes.widths.model
    heads = (sizes.heads + sizes.kv_heads) * sizes.traits.head_dim
    norms = 2 * width + (heads if sizes.traits.qk_norm != "none" else 0)
    rest = 2 * RESIDUAL_BACKWARD_PASSES * width + ROTARY_BACKWARD_PASSES * heads
    return NORM_BACKWARD_BYTES[held] * norms + held * rest + ffn


def masking_bytes(sizes: Sizes, *, on_cpu: bool) -> tuple[int, int]:
    """Bytes a token that masks add to a dense layer's forward, and those of the FFN's backward."""
    held, neurons = sizes.bytes_held, sizes.widths.ffn
    experts = sizes.granularity.num_experts
    forward = MASKED_PASSES if on_cpu else KERNEL_PASSES
    widened = held if held < FLOAT32 else 0
    router_input = sizes.widths.model * (widened + FLOAT32 if widened else 0)
    backward = held * (MASKED_BACKWARD_PASSES if on_cpu else KERNEL_BACKWARD_PASSES)
    sums = FLOAT32 + (widened + FLOAT32 if widened else 0) if on_cpu else 0
    return (
        held * (forward - GATED_PASSES) * neurons + ROUTER_BYTES * experts + router_input,
        (backward + sums) * neurons + ROUTER_BACKWARD_BYTES * experts,
    )


def alignment_work(
    sizes: Sizes, run: RunSize, *, checkpointing: bool, placement: Placement = ALONE
) -> tuple[Work, ...]:
    """One alignment step on one GPU.

    Args:
        sizes: Of model and split.
        run: Of the batch and the micro-batch; its device says which masking operations run.
        checkpointing: Whether the backward runs each layer's forward again.
        placement: Among how many GPUs.
    """
    widths, share = sizes.widths, share_of(run, placement)
    layers, tokens, experts = widths.layers, share.tokens, sizes.granularity.num_experts
    on_cpu = run.device == "cpu"
    products, attention = forward_products(sizes), attention_flops(sizes, run.seq_len)
    router = 2 * experts * widths.model * layers
    # A GPU sums over each expert's neurons by a product, a CPU by index.
    mask = 2 * widths.ffn * experts * layers * (1 if on_cpu else 2)
    head = 2 * widths.vocabulary * widths.model
    dense = layers * dense_bytes(sizes, neurons=widths.ffn)
    added, ffn = masking_bytes(sizes, on_cpu=on_cpu)
    masked = dense + layers * added
    again = 1 if checkpointing else 0
    plan = widths.ffn * experts * layers * PLAN_BYTES * share.micro_batches
    backward = layers * backward_bytes(sizes, ffn=ffn)
    own = affinity_entries(sizes, placement)
    return (
        Work(
            part="teacher forward",
            products=tokens * products,
            attention=tokens * attention,
            moved=tokens * dense,
        ),
        Work(
            part="student forward",
            products=tokens * (products + router),
            attention=tokens * attention,
            moved=tokens * masked,
        ),
        Work(
            part="head and losses",
            products=tokens * 3 * head,
            logits=tokens * LOGIT_BYTES[sizes.bytes_held] * widths.vocabulary,
        ),
        Work(
            part="backward",
            products=tokens * ((1 + again) * products + (2 + again) * router + mask),
            attention=tokens * (2 + again) * attention,
            moved=tokens * (backward + again * masked) + plan,
        ),
        Work(
            part="assignment",
            products=NEWTON_STEPS * 2 * own * experts,
            moved=ASSIGNMENT_BYTES * own,
        ),
        Work(part="optimizer", moved=ADAM_BYTES * (own + sizes.counts.routers)),
    )
