"""A random model under alignment: what the benchmarks of the alignment step measure."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM

from dotmoe.align import AlignConfig, Alignment
from dotmoe.analyse.overhead import Clock
from dotmoe.data import TokenBlocks
from dotmoe.granularity import ExpertsConfig, resolve
from dotmoe.inspection.sizes import RunSize, Sizes, sizes_of
from dotmoe.models.dense import DenseModel
from dotmoe.models.family import family_of
from dotmoe.moe.assignment import AlignState, AssignmentConfig
from dotmoe.moe.losses import DistillationLoss
from dotmoe.moe.masked import masked
from dotmoe.moe.objective import Taught
from dotmoe.moe.units import recomputing
from dotmoe.training.loop import adamw
from random_models import ROUTER_LOGIT_STD, Shape, llama_config

AFFINITY_STD = 0.3
"""Of the random affinities: at temperature 0.1 a plan as sharp as after some hundred steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A shape, its split, and one step."""

    shape: Shape
    experts: int
    active: int
    seq_len: int
    micro_batch: int
    """Sequences of one forward pass."""
    micro_batches: int
    """Forward passes of one optimizer step."""
    dtype: str
    device: str

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.seq_len * self.micro_batch * self.micro_batches

    def with_tokens(self, tokens: int) -> "Subject":
        """The same in one micro-batch of that many tokens."""
        return replace(self, micro_batch=tokens // self.seq_len, micro_batches=1)


class TimedAlignment(Alignment):
    """The alignment itself, with a clock around its parts."""

    clock: Clock

    def begin(self, step: int) -> dict[str, Tensor]:
        """See `Alignment`."""
        with self.clock.part("assignment"):
            return super().begin(step)

    def end(self) -> None:
        """See `Alignment`."""
        with self.clock.part("assignment"):
            super().end()

    def teacher(self, tokens_BT: Tensor) -> Taught | None:
        """See `Alignment`."""
        with self.clock.part("teacher forward"):
            return super().teacher(tokens_BT)

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """See `Alignment`."""
        with self.clock.part("student forward"):
            return super().hidden(tokens_BT)

    def distil(
        self, hidden_TD: Tensor, taught: Taught | None, tokens_BT: Tensor
    ) -> DistillationLoss:
        """See `Alignment`."""
        with self.clock.part("head and losses"):
            return super().distil(hidden_TD, taught, tokens_BT)

    def differentiate(self, loss: Tensor, *, is_last: bool) -> None:
        """See `Alignment`."""
        with self.clock.part("backward"):
            super().differentiate(loss, is_last=is_last)


def random_dense(subject: Subject, seed: int) -> DenseModel:
    """A frozen Llama of that shape with random weights, made on the device itself."""
    context = max(subject.shape.context, subject.seq_len)
    config = llama_config(replace(subject.shape, context=context), attn_implementation="sdpa")
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, subject.dtype))
    try:
        with torch.device(subject.device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return DenseModel(
        model=model.requires_grad_(False).eval(),
        tokenizer=None,
        family=family_of(config),
        folder=Path(),
        source="random weights",
        revision=None,
    )


def sizes(subject: Subject, dense: DenseModel) -> Sizes:
    """What the estimates of `dotmoe inspect` read."""
    dtype = getattr(torch, subject.dtype)
    split = resolve(
        ExpertsConfig(experts=subject.experts, active_experts=subject.active),
        subject.shape.ffn_width,
    )
    return sizes_of(
        dense.config,
        dense.family,
        split,
        stored=dtype,
        written=dtype,
        held=dtype.itemsize,
    )


def run_size(subject: Subject) -> RunSize:
    """One step, for the estimates."""
    batch = subject.micro_batch * subject.micro_batches
    return RunSize(
        steps=1,
        batch_size=batch,
        seq_len=subject.seq_len,
        micro_batch_size=subject.micro_batch,
        calibration_tokens=0,
        device=subject.device,
    )


class Step:
    """One optimizer step of the alignment, again and again. Use inside `with step.ready():`."""

    def __init__(
        self, subject: Subject, dense: DenseModel, *, seed: int, checkpointing: bool = False
    ) -> None:
        batch = subject.micro_batch * subject.micro_batches
        self.dense = dense
        self.config = AlignConfig(
            batch_size=batch,
            micro_batch_size=subject.micro_batch,
            activation_checkpointing=checkpointing,
        )
        self.clock = Clock(dense.device)
        self.task = TimedAlignment(
            dense,
            random_blocks(subject, seed),
            random_state(subject, seed),
            resolve(
                ExpertsConfig(experts=subject.experts, active_experts=subject.active),
                subject.shape.ffn_width,
            ),
            self.config,
            AssignmentConfig(),
            warmup_steps=0,
            seed=seed,
        )
        self.task.clock = self.clock
        groups = self.task.parameter_groups()
        self.parameters = [p for group in groups for p in group.parameters.values()]
        self.optimizer = adamw(groups, weight_decay=self.config.weight_decay)
        self.taken = 0

    @contextmanager
    def ready(self) -> Iterator["Step"]:
        """Inside, the model is masked."""
        with (
            masked(self.dense, self.task.routing),
            recomputing(self.dense, self.config.activation_checkpointing),
        ):
            yield self

    def take(self) -> dict[str, float]:
        """One step; seconds of its parts, and of all of it as `step`."""
        with self.clock.part("step"):
            self.task.accumulate_gradients(self.taken)
            with self.clock.part("optimizer"):
                torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        self.taken += 1
        return self.clock.seconds()


def random_blocks(subject: Subject, seed: int) -> TokenBlocks:
    generator = torch.Generator().manual_seed(seed)
    rows = 4 * subject.micro_batch * subject.micro_batches
    size = (rows, subject.seq_len)
    return TokenBlocks(
        torch.randint(subject.shape.vocabulary, size, generator=generator, dtype=torch.int32)
    )


def random_state(subject: Subject, seed: int) -> AlignState:
    shape, device = subject.shape, torch.device(subject.device)
    generator = torch.Generator(device).manual_seed(seed)
    affinity_size = (shape.layers, shape.ffn_width, subject.experts)
    router_size = (shape.layers, subject.experts, shape.width)
    affinity = torch.randn(affinity_size, generator=generator, device=device)
    router = torch.randn(router_size, generator=generator, device=device)
    return AlignState(
        affinity_LNE=affinity.mul_(AFFINITY_STD),
        router_LED=router.mul_(ROUTER_LOGIT_STD / shape.width**0.5),
        step=0,
    )


def peak_bytes(step: Step) -> int:
    """Most bytes of tensors that were alive at once during one step, weights included.

    On CUDA what the allocator counted. On a CPU what it handed out beyond the tensors that were
    there before the step.
    """
    device = step.dense.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step.take()
        return torch.cuda.max_memory_allocated(device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step.take()
    alive = most = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return held_bytes(step) + most


def held_bytes(step: Step) -> int:
    """Tensors that are there between two steps."""
    task = step.task
    tensors = [*step.dense.model.parameters(), *step.dense.model.buffers(), *step.parameters]
    for state in step.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    tensors += [task.routing.expert_of_neuron_LN, task.assignment.potential_LE]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
