"""How long a step takes: its work part by part, over what a machine can do.

A part takes products of matrices, attention, and bytes that operations without products read and
write: those of Transformers' operations run one by one, each reading its inputs and writing its
output. Kinds of work follow one another: nothing is taken to overlap within a device.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils.benchmark import Timer

from dotmoe.inspection.memory import ALONE, Placement, affinity_entries
from dotmoe.inspection.sizes import FLOAT32, FinetuneSize, GPUName, RunSize, Sizes, dtype_name

NORM_BYTES, NORM_BACKWARD_BYTES = {2: 36, 4: 28}, {2: 87, 4: 86}
"""Per entry of an RMSNorm's input, by the bytes of a weight; the norm itself is in float32."""
RESIDUAL_PASSES, RESIDUAL_BACKWARD_PASSES = 3, 4
ROTARY_PASSES, ROTARY_BACKWARD_PASSES = 10, 16
"""Over queries and keys: two products, a half turned and a sum; heads put together."""
GATED_PASSES, GATED_BACKWARD_PASSES = 5, 11
"""SiLU(gate) * up of an FFN, over the width that runs."""
MASKED_PASSES, MASKED_BACKWARD_PASSES = 9, 21
"""The same under the mask, in PyTorch's own operations; 10 bytes more where sums are widened."""
KERNEL_PASSES, KERNEL_BACKWARD_PASSES = 3, 8
"""The same in the Triton kernel of a GPU, and two products that read the gradient of the mask."""
GATHER_PASSES, GATHER_BACKWARD_PASSES = 4, 6
"""Over the input of an expert, once for each of k: it is gathered, and the outputs are summed."""
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


class Work(NamedTuple):
    """What one part of a step consists of."""

    products: int = 0
    """FLOP of matrix products."""
    attention: int = 0
    """FLOP of attention scores and their weighted sums."""
    moved: int = 0
    """Bytes read and written by operations without products."""
    logits: int = 0
    """The same, by the softmaxes over the vocabulary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Shares of a device's rates that the kinds of work in a step reach."""

    products: float
    attention: float
    moved: float
    logits: float
    origin: str


ON_CPU = Efficiency(
    products=0.9, attention=0.4, moved=0.65, logits=0.65, origin="fitted to measured steps"
)
ON_GPU = Efficiency(
    products=0.65, attention=0.35, moved=0.75, logits=0.75, origin="assumed, not measured"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """A machine to plan for: this one, measured, or a GPU type as its vendor describes it."""

    name: str
    dtype: str = "bfloat16"
    """Of the weights, and of the products whose rate it is."""
    flops_per_s: float
    """Of matrix products: measured on large ones, or the dense tensor-core peak."""
    bytes_per_s: float
    """Of its memory, read and written."""
    memory_bytes: int = 0
    link_bytes_per_s: float = 0
    """To the other GPUs of its node, one direction: NVLink, or PCIe where there is none."""
    network_bytes_per_s: float = 0
    """To other nodes, one direction: its share of the node's InfiniBand, as in vendors' systems."""
    efficiency: Efficiency = ON_GPU
    origin: str = "quoted"

    def seconds(self, work: Work) -> float:
        """Time of one part of a step.

            products / (u_p F) + attention / (u_a F) + moved / (u_m B) + logits / (u_l B)

        with the rates F, B of the device and its shares u.
        """
        share = self.efficiency
        products = work.products / share.products + work.attention / share.attention
        moved = work.moved / share.moved + work.logits / share.logits
        return products / self.flops_per_s + moved / self.bytes_per_s


def _quoted(name: str, tflops: float, gb: int, tb_per_s: float, link: int, net: int) -> Accelerator:
    return Accelerator(
        name=f"{name} {gb} GB",
        flops_per_s=tflops * 1e12,
        bytes_per_s=tb_per_s * 1e12,
        memory_bytes=gb * 10**9,
        link_bytes_per_s=link * 1e9,
        network_bytes_per_s=net * 1e9,
    )


ACCELERATORS: dict[GPUName, Accelerator] = {
    "a100": _quoted("A100", 312, 80, 2.039, 300, 25),
    "h100": _quoted("H100", 989, 80, 3.35, 450, 50),
    "h200": _quoted("H200", 989, 141, 4.8, 450, 50),
    "b200": _quoted("B200", 2_250, 180, 8, 900, 50),
    "l40s": _quoted("L40S", 362, 48, 0.864, 32, 25),
}
"""GPU types: TFLOP/s in bfloat16, memory in GB, its TB/s, GB/s of link and network by vendors."""


def measured_here(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.3) -> Accelerator:
    """This machine: square matrices multiplied for a moment, and memory copied for another.

    Args:
        device: Of this machine.
        dtype: Of the matrices.
        seconds: About how long, for each.
    """
    on_cpu = device.type == "cpu"
    width, entries = (512, 1 << 24) if on_cpu else (8_192, 1 << 28)
    # Varied entries: a GPU multiplies constants faster than it would real data.
    matrix = torch.linspace(-1, 1, width * width, device=device).view(width, width).to(dtype)
    source = torch.zeros(entries, device=device)
    names = {"a": matrix, "x": source, "y": torch.empty_like(source)}
    times = [
        Timer(statement, globals=names, num_threads=torch.get_num_threads())
        .blocked_autorange(min_run_time=seconds)
        .mean
        for statement in ("a @ a", "y.copy_(x)")
    ]
    return Accelerator(
        name="this CPU" if on_cpu else torch.cuda.get_device_name(device),
        dtype=dtype_name(dtype),
        flops_per_s=2 * width**3 / times[0],
        bytes_per_s=2 * source.nbytes / times[1],
        efficiency=ON_CPU if on_cpu else ON_GPU,
        origin="measured",
    )


def share_of(run: RunSize, placement: Placement) -> tuple[int, int]:
    """Tokens and micro-batches of a step on one GPU; sequences are dealt out evenly."""
    sequences = placement.part(run.batch_size)
    return sequences * run.seq_len, -(-sequences // run.micro_batch_size)


def _layer_bytes(sizes: Sizes, neurons: int) -> tuple[int, int]:
    """Bytes a token that one dense layer moves: forward, and backward without the FFN."""
    held, width, heads = sizes.held, sizes.widths.model, sizes.head_width
    norms = 2 * width + sizes.head_norms
    forward = 2 * RESIDUAL_PASSES * width + ROTARY_PASSES * heads + GATED_PASSES * neurons
    backward = 2 * RESIDUAL_BACKWARD_PASSES * width + ROTARY_BACKWARD_PASSES * heads
    return (
        NORM_BYTES[held] * norms + held * forward,
        NORM_BACKWARD_BYTES[held] * norms + held * backward,
    )


def _masking_bytes(sizes: Sizes, *, on_cpu: bool) -> tuple[int, int]:
    """Bytes a token that masks add to a dense layer's forward, and those of the FFN's backward."""
    held, neurons, experts = sizes.held, sizes.widths.ffn, sizes.split.num_experts
    widened = held + FLOAT32 if held < FLOAT32 else 0
    forward = (MASKED_PASSES if on_cpu else KERNEL_PASSES) - GATED_PASSES
    backward = held * (MASKED_BACKWARD_PASSES if on_cpu else KERNEL_BACKWARD_PASSES)
    sums = (FLOAT32 + widened) * on_cpu
    router_input = sizes.widths.model * widened
    return (
        held * forward * neurons + ROUTER_BYTES * experts + router_input,
        (backward + sums) * neurons + ROUTER_BACKWARD_BYTES * experts,
    )


def _attention(sizes: Sizes, run: RunSize) -> int:
    """FLOP a token of causal attention, forward, all layers."""
    return 2 * run.seq_len * sizes.heads * sizes.traits.head_dim * sizes.widths.layers


def alignment_work(
    sizes: Sizes, run: RunSize, placement: Placement = ALONE, *, checkpointing: bool
) -> dict[str, Work]:
    """One alignment step on one GPU, by part.

    Weights are frozen, so their products cost the backward as much as one forward, not two. Layers
    that stay dense are neither masked nor routed.

    Args:
        sizes: Of model and split.
        run: Of the batch and the micro-batch; its device says which masking operations run.
        placement: Among how many GPUs.
        checkpointing: Whether the backward runs each layer's forward again.
    """
    widths, experts, split_layers = sizes.widths, sizes.split.num_experts, sizes.moe_layers
    tokens, micro_batches = share_of(run, placement)
    on_cpu, again = run.device == "cpu", int(checkpointing)
    products = 2 * (sizes.counts.attention_and_norms + sizes.counts.ffn_total)
    attention, router = _attention(sizes, run), 2 * sizes.counts.routers
    # A GPU sums over each expert's neurons by a product, a CPU by index.
    mask = 2 * sizes.affinities * (1 if on_cpu else 2)
    head = 2 * widths.vocabulary * widths.model
    forward, backward = (widths.layers * amount for amount in _layer_bytes(sizes, widths.ffn))
    added, ffn = (split_layers * amount for amount in _masking_bytes(sizes, on_cpu=on_cpu))
    ffn += (widths.layers - split_layers) * GATED_BACKWARD_PASSES * sizes.held * widths.ffn
    own = affinity_entries(sizes, placement)
    plan = sizes.affinities * PLAN_BYTES * micro_batches
    return {
        "teacher forward": Work(tokens * products, tokens * attention, tokens * forward),
        "student forward": Work(
            tokens * (products + router), tokens * attention, tokens * (forward + added)
        ),
        "head and losses": Work(
            tokens * 3 * head, logits=tokens * LOGIT_BYTES[sizes.held] * widths.vocabulary
        ),
        "backward": Work(
            tokens * ((1 + again) * products + (2 + again) * router + mask),
            tokens * (2 + again) * attention,
            tokens * (backward + ffn + again * (forward + added)) + plan,
        ),
        "assignment": Work(NEWTON_STEPS * 2 * own * experts, moved=ASSIGNMENT_BYTES * own),
        "optimizer": Work(moved=ADAM_BYTES * (own + sizes.counts.routers)),
    }


def finetune_work(
    sizes: Sizes,
    run: RunSize,
    placement: Placement = ALONE,
    *,
    size: FinetuneSize,
    checkpointing: bool,
) -> dict[str, Work]:
    """One fine-tuning step on one GPU: next-token loss of the sparse model, no teacher.

    A backward costs one forward for the activations and, where all weights are trained, one more
    for the weights.
    """
    widths, split, held = sizes.widths, sizes.split, sizes.held
    tokens, micro_batches = share_of(run, placement)
    trained, trains_all = sizes.trained(size), size.train == "everything"
    products = 2 * (sizes.counts.attention_and_norms + sizes.counts.ffn_active)
    products += 2 * sizes.counts.routers
    merging = 0
    if size.train == "lora":
        products += 2 * sizes.adapters(size.lora_rank, experts=False)
        # Adapters of experts are added to their weights, once a pass.
        merging = 2 * size.lora_rank * sizes.counts.ffn_total * micro_batches
    attention, head = _attention(sizes, run), 2 * widths.vocabulary * widths.model
    times, again = 1 + trains_all, int(checkpointing)
    routed = held * split.active_experts * widths.model
    neurons = split.active_neurons
    forward, backward = _layer_bytes(sizes, neurons)
    forward += GATHER_PASSES * routed + ROUTER_BYTES * split.num_experts
    backward += held * GATED_BACKWARD_PASSES * neurons + GATHER_BACKWARD_PASSES * routed
    backward += ROUTER_BACKWARD_BYTES * split.num_experts + again * forward
    layers = tokens * widths.layers
    # Weights of a micro-batch are copied for the products.
    copies = (FLOAT32 + held) * micro_batches * trained * trains_all
    own = placement.part(trained) if placement.sharded else trained
    return {
        "forward": Work(tokens * products + merging, tokens * attention, layers * forward + copies),
        "head and loss": Work(
            tokens * (1 + times) * head, logits=tokens * LOGIT_BYTES[held] // 2 * widths.vocabulary
        ),
        "backward": Work(
            tokens * (times + again) * products + (2 + again) * merging,
            tokens * (2 + again) * attention,
            layers * backward,
        ),
        "optimizer": Work(moved=ADAM_BYTES * own),
    }
