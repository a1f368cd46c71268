"""What an alignment step spends its time on (app:training_overhead)."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import torch

from dotmoe.measure.analyse.run import AnalysedRun, Findings
from dotmoe.method.align import Alignment
from dotmoe.method.layout import load_layouts, load_states, splits_in
from dotmoe.method.masked import masked
from dotmoe.method.router import dense_only, router_losses
from dotmoe.models.family import TARGETS
from dotmoe.models.hooks import recomputing
from dotmoe.run.config import RunConfig
from dotmoe.text.tokenise import Text
from dotmoe.training.loop import adamw, global_norm, update, watching_ranges

OF_ASSIGNMENT = ("assignment solve", "rounding", "assignment gradient")
STRAIGHT_THROUGH = "straight-through"
OF_THE_METHOD = (*OF_ASSIGNMENT, STRAIGHT_THROUGH, "optimizer")
"""Parts of a step that distillation without this method would not have."""


def profile(run: AnalysedRun) -> Findings:
    """Mean seconds and shares of the parts of a step, from a few steps of the run's own config.

    Steps start from the run's learned affinities and routers; a first step is not counted.
    `straight-through` is the time that masks, routers and estimators add to all FFNs, estimated
    from one layer and subtracted from `student forward` and `backward`. With `other`, the parts sum
    to the step. `overhead`: time of the parts in `OF_THE_METHOD` / time of the other parts.
    """
    folder, num_steps = run.aligned, run.asked.profile_steps
    assert folder is not None  # else this analysis is left out
    config = folder.config(RunConfig)
    dense = run.original
    task = Alignment(
        dense,
        Text.load(folder.verified("data")).training,
        load_states(folder.verified("align"), dense.device),
        splits_in(load_layouts(folder.verified("extract"))),
        replace(config.align, warmup_ratio=0.0),
        config.assignment,
        seed=config.seed,
    )
    clock, samples = Clock(dense.device), []
    optimizer = adamw(task)
    again = config.align.activation_checkpointing
    with masked(dense, task.maskings):
        with recomputing(dense, again), watching_ranges(clock.part):
            for step in range(num_steps + 1):
                with clock.part("step"):
                    task.accumulate_gradients(step)
                    with clock.part("optimizer"):
                        norm = global_norm(optimizer)
                        update(optimizer, config.align.max_grad_norm, norm, factor=0.5)
                samples.append(clock.seconds())
        added_forward, added_backward = mask_cost(task, clock)
    seconds = {part: fmean(each.get(part, 0.0) for each in samples[1:]) for part in samples[-1]}
    step_s = seconds.pop("step")
    passes = -(-config.align.batch_size // task.micro_batch_size)
    passes *= dense.widths.layers - task.parts[0].masking.first_layer
    forward = min(added_forward * passes, seconds["student forward"])
    # The forward pass runs again in the backward pass where activations are recomputed.
    backward = min((added_backward + again * added_forward) * passes, seconds["backward"])
    seconds["student forward"] -= forward
    seconds["backward"] -= backward
    seconds[STRAIGHT_THROUGH] = forward + backward
    seconds["other"] = max(0.0, step_s - sum(seconds.values()))
    of_method = [part for part in OF_THE_METHOD if part in seconds]
    added_s = sum(seconds[part] for part in of_method)
    overhead, tokens = added_s / (step_s - added_s), config.align.batch_size * task.blocks.seq_len
    shares = {part: value / step_s for part, value in seconds.items()}
    largest_first = sorted(shares.items(), key=lambda item: -item[1])
    return {
        "step_s": step_s,
        "seconds": seconds,
        "shares": shares,
        "overhead": overhead,
        "overhead_parts": of_method,
        "steps": num_steps,
        "tokens_a_step": tokens,
        "clock": clock.kind,
    }, [
        f"{step_s:.3f} s for a step of {tokens:,} tokens ({clock.kind} time): "
        + ", ".join(f"{part} {100 * share:.1f} %" for part, share in largest_first),
        f"{', '.join(of_method)} add {100 * overhead:.1f} % to the time of the rest",
    ]


def mask_cost(task: Alignment, clock: "Clock") -> tuple[float, float]:
    """Seconds that routing, masks and their estimators add to one FFN, forward and backward.

    It runs a masked FFN with routing on and off, on random inputs: values do not affect the time.
    """
    dense, masking = task.dense, task.parts[0].masking
    layer = dense.family.layers(dense.model)[masking.first_layer]
    ffn = dense.family.block(layer, TARGETS["ffn"])
    tokens = task.micro_batch_size * task.blocks.seq_len
    dtype = next(dense.model.parameters()).dtype
    x = torch.randn(tokens, dense.widths.model, device=dense.device, dtype=dtype)
    x.requires_grad_()
    task.begin(0)
    rounds = []
    for _ in range(6):  # the first is not counted
        for is_masked in (True, False):
            with router_losses() as losses, nullcontext() if is_masked else dense_only():
                with clock.part(f"forward {is_masked}"):
                    output = ffn(x)
                outputs = [output, *(losses().values() if is_masked else ())]
            grads = [torch.randn_like(each) for each in outputs]
            with clock.part(f"backward {is_masked}"):
                torch.autograd.backward(outputs, grads)
        rounds.append(clock.seconds())

    def added(way: str) -> float:
        return max(0.0, median(r[f"{way} True"] - r[f"{way} False"] for r in rounds[1:]))

    return added("forward"), added("backward")


class Clock:
    """Stopwatch for named parts of a step; waits for the device before each reading.

    On a CPU with one thread it counts processor time, which excludes other processes. Otherwise
    it counts wall time.
    """

    def __init__(self, device: torch.device) -> None:
        of_processor = device.type == "cpu" and torch.get_num_threads() == 1
        self.kind = "processor" if of_processor else "wall"
        self._now = time.process_time if of_processor else time.perf_counter
        self._wait: Any = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Within this context, time counts towards the part `name`."""
        self._wait()
        start = self._now()
        yield
        self._wait()
        self._seconds[name] += self._now() - start

    def seconds(self) -> dict[str, float]:
        """Seconds of each part since the last call; starts again from zero."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return dict(seconds)
