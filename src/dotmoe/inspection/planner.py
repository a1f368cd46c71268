"""Where and how a conversion would run: does it fit, sharded or not, how fast, how long."""

from dataclasses import dataclass, replace

from dotmoe.inspection.memory import Placement, alignment_memory, finetune_memory
from dotmoe.inspection.sizes import (
    FLOAT32,
    FinetuneSize,
    GPUName,
    Items,
    Machines,
    RunSize,
    Sizes,
)
from dotmoe.inspection.step_time import (
    ACCELERATORS,
    Accelerator,
    alignment_work,
    finetune_work,
    share_of,
)

USABLE_SHARE = 0.9
"""Of a GPU's memory; the rest is for the framework, the allocator and an error of the estimate."""
AS_FAST = 0.99
"""Share of the highest speed that still counts as the highest."""
LINK_SHARE = 0.7
"""Of a link's rate that collectives are assumed to reach."""
MOST_GPUS = 1_024
"""Beyond which no number of GPUs is looked for."""
ASSIGNMENT_ENTRY = 8
"""Bytes of the expert number of a neuron."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One way to run, at the largest micro-batch that fits."""

    sharded: bool
    """The dense weights are sharded over all GPUs, else every GPU has all of them."""
    checkpointing: bool
    """Activations are computed again in the backward pass."""
    fits: bool
    micro_batch_size: int
    """Sequences in memory at once on each GPU: the most that fit; 1 where none do."""
    memory: Items
    """Bytes on each GPU."""
    parts: dict[str, float]
    """Seconds of one step; of communication, only what computing does not hide."""
    communication: dict[str, float]
    """All of a step's, hidden or not."""
    tokens_per_s: float
    """Of all GPUs together."""

    @property
    def step_s(self) -> float:
        """Seconds of one optimizer step."""
        return sum(self.parts.values())

    @property
    def way(self) -> str:
        """How it divides memory, in two words."""
        return ("sharded" if self.sharded else "whole") + ", ckpt" * self.checkpointing


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is recommended on so many GPUs of one type, and what it would take."""

    gpu: str
    gpus: int
    """Of one node."""
    nodes: int
    task: str
    origin: str
    """Of the GPU's figures."""
    tokens: int
    """Of the whole run."""
    choices: tuple[Choice, ...]
    """In order of preference: whole, sharded; then both with checkpointing."""
    recommended: int | None
    """Which of the choices: the fastest that fits, an earlier one where it is as fast; None: none
    does."""
    gpus_needed: int | None
    """Least GPUs of this type on which some choice fits; None: more than are looked for."""

    @property
    def choice(self) -> Choice | None:
        """The recommended one."""
        return None if self.recommended is None else self.choices[self.recommended]

    @property
    def hours(self) -> float | None:
        """Of the whole run, on all GPUs at once."""
        return None if self.choice is None else self.tokens / self.choice.tokens_per_s / 3_600

    @property
    def gpu_hours(self) -> float | None:
        """Hours times GPUs."""
        return None if self.hours is None else self.hours * self.gpus * self.nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What runs on one GPU: an alignment, or the fine-tuning of `size`."""

    sizes: Sizes
    run: RunSize
    size: FinetuneSize | None = None

    def memory(self, placement: Placement, micro_batch: int, *, checkpointing: bool) -> Items:
        """Peak of one step, bytes."""
        run = replace(self.run, micro_batch_size=micro_batch)
        if self.size is None:
            return alignment_memory(self.sizes, run, placement, checkpointing=checkpointing)
        return finetune_memory(
            self.sizes, run, placement, size=self.size, checkpointing=checkpointing
        )

    def seconds(
        self, gpu: Accelerator, placement: Placement, micro_batch: int, *, checkpointing: bool
    ) -> dict[str, float]:
        """Time of one step by part, without communication."""
        run = replace(self.run, micro_batch_size=micro_batch)
        if self.size is None:
            work = alignment_work(self.sizes, run, placement, checkpointing=checkpointing)
        else:
            work = finetune_work(
                self.sizes, run, placement, size=self.size, checkpointing=checkpointing
            )
        return {part: gpu.seconds(each) for part, each in work.items()}

    def traffic(self, placement: Placement, micro_batch: int) -> tuple[int, int]:
        """Bytes that one GPU exchanges in a step: weights gathered, and gradients reduced.

        Sharded layers are gathered for teacher, student and backward of every micro-batch, or for
        forward and backward. An alignment reduces the plan's gradient to the owner of each layer,
        which tells all the assignment; gradients of routers are summed everywhere. Fine-tuning
        sums gradients on every GPU; those of sharded weights, to their owner only, but of every
        micro-batch.
        """
        sizes, size = self.sizes, self.size
        micro_batches = share_of(replace(self.run, micro_batch_size=micro_batch), placement)[1]
        passes = micro_batches * placement.sharded * (3 if size is None else 2)
        gathered = passes * sizes.held * sizes.widths.layers * sizes.layer_parameters
        if size is None:
            assignment = ASSIGNMENT_ENTRY * sizes.moe_layers * sizes.widths.ffn
            routers = 2 * FLOAT32 * sizes.counts.routers
            return gathered, FLOAT32 * sizes.affinities + assignment + routers
        owned = placement.sharded and size.train == "everything"
        return gathered, FLOAT32 * sizes.trained(size) * (micro_batches if owned else 2)


def plans(
    sizes: Sizes, run: RunSize, machines: Machines, finetune: FinetuneSize | None = None
) -> tuple[Plan, ...]:
    """A plan for each GPU type and count that is asked for, with 16-bit weights.

    Args:
        sizes: Of model and split.
        run: Of batch and sequences; the micro-batch is chosen here.
        machines: Which GPUs.
        finetune: What is fine-tuned; None: the run is an alignment.
    """
    names: list[GPUName] = list(ACCELERATORS) if machines.gpu is None else [machines.gpu]
    counts = (1, 8) if machines.gpus is None else (machines.gpus,)
    task = Task(sizes=replace(sizes, held=2), run=replace(run, device="cuda"), size=finetune)
    return tuple(
        _plan(task, ACCELERATORS[name], count, machines.nodes) for name in names for count in counts
    )


def _plan(task: Task, gpu: Accelerator, gpus: int, nodes: int) -> Plan:
    ways = (False, True) if gpus * nodes > 1 else (False,)
    choices = tuple(
        _choice(task, gpu, gpus, nodes, sharded=sharded, checkpointing=checkpointing)
        for checkpointing in (False, True)
        for sharded in ways
    )
    fitting = [index for index, choice in enumerate(choices) if choice.fits]
    fastest = max((choices[index].tokens_per_s for index in fitting), default=0.0)
    good = (index for index in fitting if choices[index].tokens_per_s >= AS_FAST * fastest)
    needed = (
        ranks
        for ranks in range(1, MOST_GPUS + 1)
        if _fits(task, gpu, Placement(ranks=ranks, sharded=True), 1, checkpointing=True)
    )
    return Plan(
        gpu=gpu.name,
        gpus=gpus,
        nodes=nodes,
        task="align" if task.size is None else "finetune",
        origin=gpu.origin,
        tokens=task.run.tokens,
        choices=choices,
        recommended=next(good, None),
        gpus_needed=next(needed, None),
    )


def _fits(
    task: Task, gpu: Accelerator, placement: Placement, micro_batch: int, *, checkpointing: bool
) -> bool:
    needed = task.memory(placement, micro_batch, checkpointing=checkpointing)
    return sum(needed.values()) <= USABLE_SHARE * gpu.memory_bytes


def _choice(
    task: Task, gpu: Accelerator, gpus: int, nodes: int, *, sharded: bool, checkpointing: bool
) -> Choice:
    placement = Placement(ranks=gpus * nodes, sharded=sharded)
    most = placement.part(task.run.batch_size)
    fitting = (
        size
        for size in range(most, 0, -1)
        if _fits(task, gpu, placement, size, checkpointing=checkpointing)
    )
    fits = next(fitting, 0)
    micro_batch = max(1, fits)
    parts = task.seconds(gpu, placement, micro_batch, checkpointing=checkpointing)
    # Between nodes all GPUs of a node receive for each other, so their links add up.
    rate = gpu.link_bytes_per_s
    rate = min(rate, gpus * gpu.network_bytes_per_s) if nodes > 1 else rate
    share = (1 - 1 / placement.ranks) / (LINK_SHARE * rate)
    gathering, reducing = (share * each for each in task.traffic(placement, micro_batch))
    # The alignment reduces after its last micro-batch; fine-tuning beside each layer's backward.
    beside, after = (gathering, reducing) if task.size is None else (gathering + reducing, 0.0)
    parts["waiting for communication"] = after + max(0.0, beside - sum(parts.values()))
    return Choice(
        sharded=sharded,
        checkpointing=checkpointing,
        fits=fits > 0,
        micro_batch_size=micro_batch,
        memory=task.memory(placement, micro_batch, checkpointing=checkpointing),
        parts=parts,
        communication={"gathering weights": gathering, "reducing gradients": reducing},
        tokens_per_s=task.run.batch_size * task.run.seq_len / sum(parts.values()),
    )
