"""How long a step takes: its work part by part, over what a machine can do.

A part takes products of matrices, and bytes that other operations read and write. Those are counted
in passes over the model width, the FFN width and the vocabulary; how many passes a forward makes is
fitted to measured steps, and a backward makes twice as many. Products and bytes follow one another:
nothing is taken to overlap within a device.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils.benchmark import Timer

from dotmoe.inspection.memory import ALONE, Placement, affinity_entries
from dotmoe.inspection.sizes import FLOAT32, FinetuneSize, GPUName, RunSize, Sizes, dtype_name

ROUTED_PASSES = 3
"""Over the input of an expert, once for each of k: it is gathered, and the outputs are summed."""
PLAN_BYTES = 42
"""Per entry of the plan and micro-batch: its gradient is formed and added up."""
ASSIGNMENT_BYTES = 150
"""Per entry of A and step: passes of Newton's method, rounding and implicit gradient."""
ADAM_BYTES = 40
"""Per trainable entry: clipping reads the gradient twice; AdamW reads four and writes three."""


class Work(NamedTuple):
    """What one part of a step consists of."""

    products: int = 0
    """FLOP of matrix products; of attention, those of the whole square, of which half is needed."""
    moved: int = 0
    """Bytes read and written by operations without products."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Shares of a device's rates that a step reaches, and how often operations pass over memory."""

    products: float
    moved: float
    width: int
    """Passes of one layer's forward over the model width."""
    neurons: int
    """Passes of one layer's forward over the FFN width, masks and routers included."""
    vocabulary: int
    """Passes of the distillation loss over the logits of a token, with its gradient."""
    origin: str


ON_CPU = Efficiency(
    products=0.95,
    moved=0.65,
    width=31,
    neurons=13,
    vocabulary=44,
    origin="fitted to measured steps",
)
ON_GPU = Efficiency(
    products=0.65, moved=0.75, width=56, neurons=5, vocabulary=60, origin="assumed, not measured"
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
        """Time of one part of a step: products / (u_p F) + moved / (u_m B).

        F and B are the rates of the device, u the shares of them.
        """
        share = self.efficiency
        products = work.products / (share.products * self.flops_per_s)
        return products + work.moved / (share.moved * self.bytes_per_s)


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


def _passes(run: RunSize) -> Efficiency:
    return ON_CPU if run.device == "cpu" else ON_GPU


def _layer_bytes(sizes: Sizes, run: RunSize, neurons: int) -> int:
    """Bytes a token that the forward of one layer moves; the backward moves twice as many."""
    passes = _passes(run)
    return sizes.held * (passes.width * sizes.widths.model + passes.neurons * neurons)


def _attention(sizes: Sizes, run: RunSize) -> int:
    """FLOP a token of attention without its projections, forward, all layers."""
    return 4 * run.seq_len * sizes.heads * sizes.traits.head_dim * sizes.widths.layers


def alignment_work(
    sizes: Sizes, run: RunSize, placement: Placement = ALONE, *, checkpointing: bool
) -> dict[str, Work]:
    """One alignment step on one GPU, by part.

    Weights are frozen, so their products cost the backward as much as one forward, not two.

    Args:
        sizes: Of model and split.
        run: Of the batch and the micro-batch; its device says which masking operations run.
        placement: Among how many GPUs.
        checkpointing: Whether the backward runs each layer's forward again.
    """
    tokens, micro_batches = share_of(run, placement)
    again = int(checkpointing)
    products = 2 * (sizes.counts.attention_and_norms + sizes.counts.ffn_total)
    attention, router = _attention(sizes, run), 2 * sizes.counts.routers
    # A GPU sums over each expert's neurons by a product, a CPU by index.
    mask = 2 * sizes.affinities * (1 if run.device == "cpu" else 2)
    vocabulary = sizes.widths.vocabulary
    forward = tokens * sizes.widths.layers * _layer_bytes(sizes, run, sizes.widths.ffn)
    own = affinity_entries(sizes, placement)
    return {
        "teacher forward": Work(tokens * (products + attention), forward),
        "student forward": Work(tokens * (products + attention + router), forward),
        "head and losses": Work(
            tokens * 6 * vocabulary * sizes.widths.model,
            tokens * sizes.held * _passes(run).vocabulary * vocabulary,
        ),
        "backward": Work(
            tokens * ((1 + again) * products + (2 + again) * (attention + router) + mask),
            (2 + again) * forward + sizes.affinities * PLAN_BYTES * micro_batches,
        ),
        "assignment": Work(moved=ASSIGNMENT_BYTES * own),
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
    layer = _layer_bytes(sizes, run, split.active_neurons)
    layer += ROUTED_PASSES * held * split.active_experts * widths.model
    forward = tokens * widths.layers * layer
    # Weights of a micro-batch are copied for the products.
    copies = (FLOAT32 + held) * micro_batches * trained * trains_all
    own = placement.part(trained) if placement.sharded else trained
    # The loss has one model's logits, not two.
    logits = tokens * held * _passes(run).vocabulary // 2 * widths.vocabulary
    return {
        "forward": Work(tokens * (products + attention) + merging, forward + copies),
        "head and loss": Work(tokens * (1 + times) * head, logits),
        "backward": Work(
            tokens * ((times + again) * products + (2 + again) * attention) + (2 + again) * merging,
            (2 + again) * forward,
        ),
        "optimizer": Work(moved=ADAM_BYTES * own),
    }
