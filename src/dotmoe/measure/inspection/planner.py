"""Plan where and how a conversion would run: whether it fits, how fast, how long.

The time of a step is that of its matrix products, and of the bytes that other operations move,
counted in passes over the model width, the FFN width and the vocabulary. The passes of a forward
are fitted to measured steps; a backward makes twice as many. Nothing overlaps within a device.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dotmoe.common.numbers import ceil_div
from dotmoe.measure.inspection.accelerators import Accelerator, Efficiency
from dotmoe.measure.inspection.sizes import FLOAT32, Step, step_memory

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
