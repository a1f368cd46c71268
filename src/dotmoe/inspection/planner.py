"""Where and how a conversion would run: does it fit, sharded or not, how fast, how long."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from dotmoe.errors import UserError
from dotmoe.inspection.accelerators import ACCELERATORS, Accelerator, GPUName
from dotmoe.inspection.placement import Placement
from dotmoe.inspection.sizes import Item, RunSize, Sizes, total
from dotmoe.inspection.step_time import ON_GPU, Speed, seconds
from dotmoe.inspection.tasks import Alignment, Finetuning

USABLE_SHARE = 0.9
"""Of a GPU's memory; the rest is for the framework, the allocator and an error of the estimate."""
AS_FAST = 0.99
"""Share of the highest speed that still counts as the highest."""
LINK_SHARE = 0.7
"""Of a link's rate that collectives are assumed to reach."""
MOST_GPUS = 1_024
"""Beyond which no number of GPUs is looked for."""

Kind = Literal["align", "finetune"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """GPUs to plan for."""

    task: Kind = "align"
    """What they are to do: the alignment, or fine-tuning of what it gave."""
    gpu: GPUName | None = None
    """GPU type. Left out: each of them."""
    gpus: int | None = None
    """GPUs of one node. Left out: 1 and 8."""
    nodes: int = 1
    """Nodes of so many GPUs, joined by InfiniBand."""

    def __post_init__(self) -> None:
        """Refuse counts below one."""
        for name, value in (("gpus", self.gpus), ("nodes", self.nodes)):
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}, but it must be at least 1.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A part of a step and its seconds."""

    part: str
    seconds: float


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
    memory: tuple[Item, ...]
    """Bytes on each GPU."""
    parts: tuple[Timed, ...]
    """Of one step; of communication, only what computing does not hide."""
    communication: tuple[Timed, ...]
    """All of a step's, hidden or not."""
    tokens_per_s: float
    """Of all GPUs together."""

    @property
    def step_s(self) -> float:
        """Seconds of one optimizer step."""
        return sum(part.seconds for part in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is recommended on so many GPUs of one type, and what it would take."""

    gpu: str
    gpus: int
    """Of one node."""
    nodes: int
    task: Kind
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


def plans(
    sizes: Sizes, run: RunSize, machines: Machines, task: Alignment | Finetuning
) -> tuple[Plan, ...]:
    """A plan for each GPU type and count that is asked for, with 16-bit weights.

    Args:
        sizes: Of model and split.
        run: Of batch and sequences; the micro-batch is chosen here.
        machines: Which GPUs.
        task: What runs on them.
    """
    names: Iterable[GPUName] = ACCELERATORS if machines.gpu is None else (machines.gpu,)
    counts = (1, 8) if machines.gpus is None else (machines.gpus,)
    held, there = replace(sizes, bytes_held=2), replace(run, device="cuda")
    return tuple(
        _Setting(
            sizes=held,
            run=there,
            gpu=ACCELERATORS[name],
            gpus=count,
            nodes=machines.nodes,
            task=task,
        ).plan()
        for name in names
        for count in counts
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setting:
    """All but the way to run, which is chosen."""

    sizes: Sizes
    run: RunSize
    gpu: Accelerator
    gpus: int
    nodes: int
    task: Alignment | Finetuning

    def placement(self, *, sharded: bool) -> Placement:
        return Placement(ranks=self.gpus * self.nodes, sharded=sharded)

    def plan(self) -> Plan:
        weights = (False, True) if self.gpus * self.nodes > 1 else (False,)
        choices = tuple(
            self._choice(self.placement(sharded=sharded), checkpointing)
            for checkpointing in (False, True)
            for sharded in weights
        )
        return Plan(
            gpu=self.gpu.name,
            gpus=self.gpus,
            nodes=self.nodes,
            task=self.task.kind,
            origin=self.gpu.origin,
            tokens=self.run.tokens,
            choices=choices,
            recommended=_best(choices),
            gpus_needed=self._gpus_needed(),
        )

    def _choice(self, placement: Placement, checkpointing: bool) -> Choice:
        size = self._largest_micro_batch(placement, checkpointing)
        run = replace(self.run, micro_batch_size=max(1, size))
        parts, communication = self._timed(run, placement, checkpointing)
        step_s = sum(part.seconds for part in parts)
        return Choice(
            sharded=placement.sharded,
            checkpointing=checkpointing,
            fits=size > 0,
            micro_batch_size=run.micro_batch_size,
            memory=self.task.memory(self.sizes, run, placement, checkpointing=checkpointing),
            parts=parts,
            communication=communication,
            tokens_per_s=run.batch_size * run.seq_len / step_s,
        )

    def _largest_micro_batch(self, placement: Placement, checkpointing: bool) -> int:
        """Sequences that fit at once, 0 to those of one GPU: memory grows with them."""
        for size in range(-(-self.run.batch_size // placement.ranks), 0, -1):
            if self._fits(size, placement, checkpointing):
                return size
        return 0

    def _gpus_needed(self) -> int | None:
        """Least number on which one sequence fits, in the way that takes the least memory."""
        for ranks in range(1, MOST_GPUS + 1):
            if self._fits(1, Placement(ranks=ranks, sharded=True), checkpointing=True):
                return ranks
        return None

    def _fits(self, micro_batch_size: int, placement: Placement, checkpointing: bool) -> bool:
        run = replace(self.run, micro_batch_size=micro_batch_size)
        needed = self.task.memory(self.sizes, run, placement, checkpointing=checkpointing)
        return total(needed) <= USABLE_SHARE * self.gpu.memory_bytes

    def _timed(
        self, run: RunSize, placement: Placement, checkpointing: bool
    ) -> tuple[tuple[Timed, ...], tuple[Timed, ...]]:
        """Parts of a step, and all its communication, hidden by computing or not."""
        speed = Speed(
            flops_per_s=self.gpu.peak_flops_per_s,
            bytes_per_s=self.gpu.memory_bytes_per_s,
            efficiency=ON_GPU,
        )
        work = self.task.work(self.sizes, run, placement, checkpointing=checkpointing)
        computing = [Timed(part=part.part, seconds=seconds(part, speed)) for part in work]
        traffic = self.task.traffic(self.sizes, run, placement)
        gathering, reducing = (
            self._collective(amount) for amount in (traffic.gathered, traffic.reduced)
        )
        beside, after = (gathering, reducing) if traffic.at_end else (gathering + reducing, 0.0)
        waiting = after + max(0.0, beside - sum(part.seconds for part in computing))
        return (
            (*computing, Timed(part="waiting for communication", seconds=waiting)),
            (
                Timed(part="gathering weights", seconds=gathering),
                Timed(part="reducing gradients", seconds=reducing),
            ),
        )

    def _collective(self, amount: int) -> float:
        """Seconds until each GPU has so many bytes, of which it has its own part.

        Between nodes all GPUs of a node receive for each other, so their links add up.
        """
        rate = self.gpu.link_bytes_per_s
        if self.nodes > 1:
            rate = min(rate, self.gpus * self.gpu.network_bytes_per_s)
        return amount * (1 - 1 / (self.gpus * self.nodes)) / (LINK_SHARE * rate)


def _best(choices: tuple[Choice, ...]) -> int | None:
    fastest = max((choice.tokens_per_s for choice in choices if choice.fits), default=None)
    if fastest is None:
        return None
    good = (c.fits and c.tokens_per_s >= AS_FAST * fastest for c in choices)
    return list(good).index(True)
