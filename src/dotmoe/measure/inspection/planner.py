"""Plan where and how a conversion would run: whether it fits, how fast, how long.

The time of a step is that of its matrix products, and of the bytes that other operations move,
counted in passes over the model width, the FFN width and the vocabulary. The passes of a forward
are fitted to measured steps; a backward makes twice as many. Nothing overlaps within a device.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.benchmark import Timer

from dotmoe.common.distributed import memory_of
from dotmoe.common.numbers import ceil_div
from dotmoe.measure.inspection.sizes import FLOAT32, Step, step_memory
from dotmoe.models.checkpoint import dtype_name

ROUTED_PASSES = 3
"""Memory passes over an expert's input, for each of k: inputs are gathered, outputs summed."""
ASSIGNMENT_BYTES = 190
"""Bytes per entry of A and step: Newton's method, rounding, implicit gradient, plan's gradient."""
ADAM_BYTES = 40
"""Bytes per trained entry: clipping reads the gradient twice; AdamW reads four and writes three."""
USABLE_SHARE = 0.9
"""Share of a GPU's memory to use; the rest is for framework, allocator and errors of estimates."""
AS_FAST = 0.99
"""Share of the highest speed that still counts as the highest."""
HOST_BYTES_PER_S, HOST_LINK_BYTES_PER_S = 100e9, 25e9
"""Rates, per GPU, of a host's memory and of its link to the GPU, assumed."""
LINK_SHARE = 0.7
"""Share of a link's rate that collectives are assumed to reach."""


class Efficiency(NamedTuple):
    """Shares of a device's rates that a step reaches, and passes of its operations over memory.

    `width` and `neurons` count passes of a layer's forward (masks and routers included),
    `vocabulary` those of the distillation loss and its gradient over the logits of a token.
    """

    products: float
    moved: float
    width: int
    neurons: int
    vocabulary: int


ON_CPU = Efficiency(products=0.95, moved=0.65, width=31, neurons=13, vocabulary=44)
"""Efficiency of CPUs, fitted to measured steps."""
ON_GPU = Efficiency(products=0.65, moved=0.75, width=56, neurons=9, vocabulary=60)
"""Efficiency of GPUs, assumed, not measured; passes are those of the operations without fusion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """A machine to plan for: this one, measured, or a GPU type as its vendor describes it.

    Rates are those of matrix products in `dtype` (measured on large ones, or the dense tensor-core
    peak), in float32 and float64 (0: as in `dtype`), and of memory reads and writes; that of a link
    to the other GPUs (NVLink, or PCIe) is for one direction; processes of one CPU need none.
    """

    name: str
    dtype: str = "bfloat16"
    flops_per_s: float
    single_flops_per_s: float = 0
    double_flops_per_s: float = 0
    bytes_per_s: float
    memory_bytes: int = 0
    link_bytes_per_s: float = math.inf
    on_cpu: bool = False
    origin: str = "quoted"
    gpus: int = 1
    """Number of such devices on its node."""

    @property
    def place(self) -> dict[str, Any]:
        """Which devices these are, as JSON values."""
        return {"gpu": self.name, "gpus": self.gpus, "origin": self.origin}

    @property
    def efficiency(self) -> Efficiency:
        """The share of its rates that a step reaches."""
        return ON_CPU if self.on_cpu else ON_GPU

    def computing_in(self, dtype: str) -> "Accelerator":
        """This machine as it computes in that dtype; `auto` and 16 bits: as it is."""
        if dtype != "float32":
            return self
        return replace(self, dtype=dtype, flops_per_s=self.single_flops_per_s)

    @property
    def cache_bytes(self) -> int:
        """Bytes moved when a token reads one entry of the keys and values of a query's head.

        On a CPU fitted to measured steps, where 16 bits are slower; on a GPU three passes, assumed.
        """
        if self.on_cpu:
            return 10 if self.weight_bytes == FLOAT32 else 22
        return 3 * self.weight_bytes

    @property
    def link(self) -> float:
        """Bytes per second that a collective between GPUs is assumed to reach."""
        return LINK_SHARE * self.link_bytes_per_s

    @property
    def weight_bytes(self) -> Literal[2, 4]:
        """Bytes of a dense weight in its memory."""
        return 4 if self.dtype == "float32" else 2


class _DataSheet(NamedTuple):
    """What the vendor of a GPU type states."""

    bfloat16_tflops: float
    """TFLOP/s of products."""
    float32_tflops: float
    float64_tflops: float
    memory_gb: int
    memory_tb_per_s: float
    link_gb_per_s: float

    def accelerator(self, name: str) -> Accelerator:
        return Accelerator(
            name=f"{name.upper()} {self.memory_gb} GB",
            flops_per_s=self.bfloat16_tflops * 1e12,
            single_flops_per_s=self.float32_tflops * 1e12,
            double_flops_per_s=self.float64_tflops * 1e12,
            bytes_per_s=self.memory_tb_per_s * 1e12,
            memory_bytes=self.memory_gb * 10**9,
            link_bytes_per_s=self.link_gb_per_s * 1e9,
        )


_DATA_SHEETS = {
    "a100": _DataSheet(312, 19.5, 19.5, 80, 2.039, 300),
    "h100": _DataSheet(989, 67, 67, 80, 3.35, 450),
    "h200": _DataSheet(989, 67, 67, 141, 4.8, 450),
    "b200": _DataSheet(2_250, 75, 37, 180, 8, 900),
    "l40s": _DataSheet(362, 91.6, 1.4, 48, 0.864, 32),
}
ACCELERATORS = {name: sheet.accelerator(name) for name, sheet in _DATA_SHEETS.items()}
"""GPU types by vendors' data."""


def measured_here(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.3) -> Accelerator:
    """This machine, measured by matrix products and memory copies, for about `seconds` each."""
    on_cpu = device.type == "cpu"
    width = 512 if on_cpu else 8_192
    entries = 1 << 24 if on_cpu else 1 << 28
    # Varied entries: a GPU multiplies constants faster than it would real data.
    matrix = torch.linspace(-1, 1, width * width, device=device).view(width, width)
    source = torch.zeros(entries, device=device)
    names = {"a": matrix.to(dtype), "x": source, "y": torch.empty_like(source)}
    names |= {"single": matrix, "double": matrix.double()}
    product_s, single_s, double_s, copy_s = (
        Timer(statement, globals=names, num_threads=torch.get_num_threads())
        .blocked_autorange(min_run_time=seconds)
        .mean
        for statement in ("a @ a", "single @ single", "double @ double", "y.copy_(x)")
    )
    return Accelerator(
        name="this CPU" if on_cpu else torch.cuda.get_device_name(device),
        dtype=dtype_name(dtype),
        flops_per_s=2 * width**3 / product_s,
        single_flops_per_s=2 * width**3 / single_s,
        double_flops_per_s=2 * width**3 / double_s,
        bytes_per_s=2 * source.nbytes / copy_s,
        memory_bytes=memory_of(device),
        on_cpu=on_cpu,
        origin="measured",
    )


def products(step: Step) -> dict[str, int]:
    """FLOP of the matrix products of one step on one GPU, by part.

    A backward costs one forward for the activations, and one more for the weights that are
    trained. Attention counts the whole square. A teacher runs all of the dense model.
    """
    sizes, counts, widths = step.sizes, step.sizes.counts, step.sizes.widths
    tokens = step.part(step.batch_size) * step.seq_len
    scores = 4 * step.seq_len * sizes.queries * widths.layers
    dense = 2 * (counts.attention_and_norms + counts.ffn_total + counts.routers)
    linear = dense
    if not step.is_alignment:  # of the FFNs what runs
        linear -= 2 * (counts.ffn_total - counts.ffn_active)
    forward, backward = linear + scores, linear + 2 * scores
    heads = 2  # forward and backward
    if step.has_teacher:
        forward += dense + scores
        heads += 1
    if step.train == "everything":
        backward += linear
        heads += 1
    elif step.train == "experts":
        backward += 2 * counts.ffn_active
    elif step.is_alignment:  # neurons' gradients are summed by expert
        backward += 2 * sizes.affinities
    if step.checkpointing:
        backward += linear + scores
    return {
        "forward": tokens * forward,
        "head and loss": tokens * heads * 2 * widths.vocabulary * widths.model,
        "backward": tokens * backward,
    }


def bytes_moved(step: Step, passes: Efficiency) -> dict[str, int]:
    """Bytes that all but matrix products read and write in one step on one GPU, by part."""
    sizes, widths = step.sizes, step.sizes.widths
    tokens = step.part(step.batch_size) * step.seq_len
    layer = passes.width * widths.model + passes.neurons * step.neurons
    dense = passes.width * widths.model + passes.neurons * widths.ffn
    logits = passes.vocabulary * widths.vocabulary
    if step.is_alignment:
        optimizer = (ADAM_BYTES + ASSIGNMENT_BYTES) * step.own_affinities
        optimizer += ADAM_BYTES * sizes.counts.routers
    else:
        layer += ROUTED_PASSES * sizes.split.active_experts * widths.model
        if not step.distils:  # logits of one model, not two
            logits //= 2
        own = step.part(step.trained) if step.sharded else step.trained
        optimizer = ADAM_BYTES * own
    of_all_layers = tokens * step.weight_bytes * widths.layers
    student = of_all_layers * layer
    teacher = of_all_layers * dense
    return {
        "forward": student + teacher if step.has_teacher else student,
        "head and loss": tokens * step.weight_bytes * logits,
        "backward": 3 * student if step.checkpointing else 2 * student,
        "assignment and optimizer" if step.is_alignment else "optimizer": optimizer,
    }


def seconds(step: Step, machine: Accelerator) -> dict[str, float]:
    """Time of one step by part, without communication: products / (u_p F) + moved / (u_m B).

    F and B are the rates of the device, u_p and u_m the shares of them that a step reaches.
    """
    share = machine.efficiency
    flops = products(step)
    parts = {
        part: flops.get(part, 0) / (share.products * machine.flops_per_s)
        + amount / (share.moved * machine.bytes_per_s)
        for part, amount in bytes_moved(step, share).items()
    }
    if step.offload:
        # A micro-batch reads weights for forward and backward, and gives gradients.
        copies = 3 * ceil_div(step.part(step.batch_size), step.micro_batch_size)
        own = step.part(step.trained)
        parts["optimizer"] = ADAM_BYTES * own / HOST_BYTES_PER_S
        parts["copies from and to the host"] = copies * FLOAT32 * own / HOST_LINK_BYTES_PER_S
    return parts


def traffic(step: Step) -> int:
    """Bytes that one GPU exchanges in a step: weights gathered, and gradients reduced.

    For every micro-batch, sharded layers are gathered for the teacher if there is one, for the
    student and for the backward. An alignment reduces the plan's gradient to the owner of
    each layer. Finetuning sums gradients on every GPU; those of sharded weights only on their
    owner, but for every micro-batch.
    """
    sizes = step.sizes
    times = ceil_div(step.part(step.batch_size), step.micro_batch_size)
    layers = step.weight_bytes * sizes.widths.layers * sizes.layer_parameters
    gathered = 0
    if step.sharded:
        passes = 3 if step.has_teacher else 2
        gathered = times * passes * layers
    if step.is_alignment:
        return gathered + FLOAT32 * sizes.affinities
    sums = times if step.sharded and step.trains_weights else 2
    return gathered + FLOAT32 * step.trained * sums


def plan_step(step: Step, machine: Accelerator, *, tokens: int) -> dict[str, Any]:
    """Recommend how to run on `tokens` tokens on a machine, as JSON values.

    `choices` are the ways to run at the largest micro-batch: whole weights, sharded ones, both with
    checkpointing, and on a GPU with what is trained on the host, too. `recommended` is the fastest
    that fits, or an earlier one that is as fast; if none fits it is None, as are the hours.
    """
    step = replace(
        step,
        weight_bytes=machine.weight_bytes,
        on_cpu=machine.on_cpu,
        memory_bytes=machine.memory_bytes,
        ranks=machine.gpus,
    )
    choices = []
    for way in _ways(step):
        fits = most_at_once(way, machine)
        way = replace(way, micro_batch_size=max(1, fits))
        choices.append({**_on_machine(way, machine), "fits": fits > 0})
    usable = [choice for choice in choices if choice["fits"]]
    best = max((choice["tokens_per_s"] for choice in usable), default=0)
    chosen = next((each for each in usable if each["tokens_per_s"] >= AS_FAST * best), None)
    hours = None if chosen is None else tokens / chosen["tokens_per_s"] / 3_600
    return {
        **machine.place,
        "choices": choices,
        "recommended": chosen,
        "hours": hours,
        "gpu_hours": None if hours is None else hours * machine.gpus,
    }


def _ways(step: Step) -> Iterator[Step]:
    """Yield the step in each way to run it: see `plan_step`."""
    for checkpointing in (False, True):
        yield replace(step, checkpointing=checkpointing, sharded=False, offload=False)
        if step.ranks > 1:
            yield replace(step, checkpointing=checkpointing, sharded=True, offload=False)
    if step.can_offload:
        for checkpointing in (False, True):
            is_sharded = step.ranks > 1
            yield replace(step, checkpointing=checkpointing, sharded=is_sharded, offload=True)


def _name_of_way(step: Step) -> str:
    place = "whole"
    if step.offload:
        place = "offloaded"
    elif step.sharded:
        place = "sharded"
    return f"{place}, ckpt" if step.checkpointing else place


def _on_machine(step: Step, machine: Accelerator) -> dict[str, Any]:
    """Memory of each GPU by item; seconds, FLOP and bytes of a step by part, as JSON values.

    Communication overlaps with computation as far as that lasts.
    """
    parts = seconds(step, machine)
    memory = step_memory(step)
    if step.ranks > 1:
        communication = (1 - 1 / step.ranks) * traffic(step) / machine.link
        parts["waiting for communication"] = max(0.0, communication - sum(parts.values()))
    step_s = sum(parts.values())
    return {
        "way": _name_of_way(step),
        "sharded": step.sharded,
        "offload": step.offload,
        "on_host": step.on_host,
        "checkpointing": step.checkpointing,
        "micro_batch_size": step.micro_batch_size,
        "memory": memory,
        "memory_total": sum(memory.values()),
        "parts": parts,
        "flop": products(step),
        "bytes": bytes_moved(step, machine.efficiency),
        "step_s": step_s,
        "tokens_per_s": step.tokens / step_s,
    }


def fit_to_memory(step: Step, memory_bytes: int) -> Step:
    """The step if it fits into a device, else as a change lets it fit.

    Tried are activation checkpointing, then smaller micro-batches with it, then what is trained on
    the host, if it is no adapters; the last one is of one sequence, whether it fits or not.
    """
    ways = [step]
    offloads = [step.offload]
    if step.can_offload and not step.offload:
        offloads.append(True)
    for offload in offloads:
        size = step.micro_batch_size
        while size:
            way = replace(step, offload=offload, sharded=step.sharded or offload)
            ways.append(replace(way, checkpointing=True, micro_batch_size=size))
            size //= 2
    most = USABLE_SHARE * memory_bytes
    return next((way for way in ways if sum(step_memory(way).values()) <= most), ways[-1])


def most_at_once(step: Step, machine: Accelerator) -> int:
    """The largest micro-batch with which a step fits on each GPU; 0 if none fits."""

    def memory(size: int) -> int:
        return sum(step_memory(replace(step, micro_batch_size=size)).values())

    sizes = range(1, step.part(step.batch_size) + 1)
    return bisect_right(sizes, USABLE_SHARE * machine.memory_bytes, key=memory)
