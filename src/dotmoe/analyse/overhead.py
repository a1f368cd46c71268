"""What an alignment step spends its time on (app:training_overhead)."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dotmoe.align import Alignment
from dotmoe.analyse.run import AnalysedRun
from dotmoe.config import RunConfig
from dotmoe.granularity import Granularity
from dotmoe.layout import ExpertLayout
from dotmoe.load import load_dense
from dotmoe.models.dense import DenseModel
from dotmoe.moe.assignment import AlignState
from dotmoe.moe.losses import balance_loss, z_loss
from dotmoe.moe.masked import masked, masked_activation
from dotmoe.moe.router import Surrogate, router_logits, straight_through_top_k
from dotmoe.moe.units import recomputing
from dotmoe.tokenise import Text
from dotmoe.training.loop import adamw, global_norm, update

OF_TASK = {
    "teacher": "dense forward",
    "hidden": "student forward",
    "distil": "head and losses",
    "differentiate": "backward",
}
OF_ASSIGNMENT = {
    "plan": "assignment solve",
    "rounded": "rounding",
    "backward_plan": "assignment gradient",
}
STRAIGHT_THROUGH = "straight-through"
OF_THE_METHOD = (*OF_ASSIGNMENT.values(), STRAIGHT_THROUGH, "optimizer")
"""Parts that a distillation step of the dense model with frozen weights would not have."""
MEAN_LR_FACTOR = 0.5
"""Mean of half a cosine."""
_ROUNDS = 5


def values(run: AnalysedRun) -> dict[str, Any]:
    """Mean seconds and shares of the parts of a step, from a few steps of the run's own config.

    Steps start from what the run has learned; one more is taken first and not counted.
    `straight-through` is what masks, routers and estimators add to the FFNs, measured on one layer
    alone and taken out of `student forward` and `backward`; all parts and `other` make up the step.

    Returns:
        `step_s`, `seconds` and `shares` by part, `overhead`: time of `OF_THE_METHOD` over that of
        everything else in the step, `steps`, `tokens_a_step`, `clock`.
    """
    folder = run.aligned
    assert folder is not None  # `Analysis.lack` says otherwise
    config = folder.config(RunConfig)
    dense = load_dense(config.model, run.config.load) if run.is_finetuned else run.dense
    split = ExpertLayout.load(folder.verified("extract") / "layout.safetensors").granularity
    task = Alignment(
        dense,
        Text.load(folder.verified("data")).training,
        AlignState.load(folder.verified("align") / "state.safetensors", dense.device),
        split,
        config.align,
        config.assignment,
        warmup_steps=0,
        seed=config.seed,
    )
    clock = Clock(dense.device)
    samples = _step_seconds(task, run.config.profile_steps, clock)
    seconds = {part: fmean(each.get(part, 0.0) for each in samples) for part in samples[0]}
    step = seconds.pop("step")
    tokens = task.micro_batch_size * task.blocks.seq_len
    cost = mask_cost(dense, split, tokens, config.align.surrogate, clock)
    times = -(-config.align.batch_size // task.micro_batch_size)
    times *= dense.widths.layers - split.first_dense_layers
    # The forward pass runs again in the backward pass where activations are recomputed.
    again = cost.forward_s if config.align.activation_checkpointing else 0.0
    forward = min(cost.forward_s * times, seconds["student forward"])
    backward = min((cost.backward_s + again) * times, seconds["backward"])
    seconds["student forward"] -= forward
    seconds["backward"] -= backward
    seconds[STRAIGHT_THROUGH] = forward + backward
    seconds["other"] = max(0.0, step - sum(seconds.values()))
    of_method = sum(seconds.get(part, 0.0) for part in OF_THE_METHOD)
    return {
        "step_s": step,
        "seconds": seconds,
        "shares": {part: value / step for part, value in seconds.items()},
        "overhead": of_method / (step - of_method),
        "overhead_parts": [part for part in OF_THE_METHOD if part in seconds],
        "steps": len(samples),
        "tokens_a_step": config.align.batch_size * task.blocks.seq_len,
        "clock": clock.kind,
    }


def says(values: dict[str, Any]) -> list[str]:
    """Shares of a step, largest first, and what the method adds."""
    shares = sorted(values["shares"].items(), key=lambda item: -item[1])
    parts = ", ".join(f"{part} {100 * share:.1f} %" for part, share in shares)
    return [
        f"{values['step_s']:.3f} s a step of {values['tokens_a_step']:,} tokens "
        f"({values['clock']}): {parts}",
        f"{', '.join(values['overhead_parts'])} add {100 * values['overhead']:.1f} % to the rest",
    ]


def _step_seconds(task: Alignment, num_steps: int, clock: "Clock") -> list[dict[str, float]]:
    """Seconds of each part in each step."""
    config = task.config
    time_methods(task, OF_TASK, clock)
    time_methods(task.assignment, OF_ASSIGNMENT, clock)
    groups = task.parameter_groups()
    parameters = [p for group in groups for p in group.parameters.values()]
    optimizer = adamw(groups, weight_decay=config.weight_decay)
    samples = []
    with masked(task.dense, task.routing), recomputing(task.dense, config.activation_checkpointing):
        for step in range(num_steps + 1):
            with clock.part("step"):
                task.accumulate_gradients(step)
                with clock.part("optimizer"):
                    norm = global_norm(parameters)
                    update(optimizer, config.max_grad_norm, norm, MEAN_LR_FACTOR)
            samples.append(clock.seconds())
    return samples[1:]


class MaskCost(NamedTuple):
    """Seconds that routing, masks and their estimators add to one FFN, beyond the dense one."""

    forward_s: float
    backward_s: float


def mask_cost(
    dense: DenseModel, split: Granularity, tokens: int, surrogate: Surrogate, clock: "Clock"
) -> MaskCost:
    """What masks and their estimators cost one FFN in one pass, by running it with and without.

    Only what lies between the projections is run, on random numbers, which cost what others do.
    `dense` gives sizes, dtype and device; a pass has so many `tokens`.
    """
    device, widths = dense.device, dense.widths
    dtype = next(dense.model.parameters()).dtype
    gate, up, grad = torch.randn(3, tokens, widths.ffn, device=device).to(dtype)
    x = torch.randn(tokens, widths.model, device=device).to(dtype)
    router = torch.randn(split.num_experts, widths.model, device=device) / widths.model**0.5
    expert_of_neuron = torch.arange(widths.ffn, device=device) % split.num_experts
    plan = torch.rand(widths.ffn, split.num_experts, device=device)
    inputs = (gate, up, x, router, plan)
    for tensor in inputs:
        tensor.requires_grad_()
    rounds = []
    for _ in range(_ROUNDS + 1):
        with clock.part("plain forward"):
            plain = F.silu(gate) * up
        with clock.part("plain backward"):
            plain.backward(grad)
        with clock.part("masked forward"):
            logits = router_logits(x, router)
            routing = straight_through_top_k(logits, split.active_experts, surrogate=surrogate)
            out = masked_activation(gate, up, routing.mask_TE, expert_of_neuron, plan)
            auxiliary = z_loss(logits) + balance_loss(logits, routing.mask_TE)
        with clock.part("masked backward"):
            torch.autograd.backward([out, auxiliary], [grad, torch.ones_like(auxiliary)])
        for tensor in inputs:
            tensor.grad = None
        rounds.append(clock.seconds())
    forward, backward = (
        median(one[f"masked {way}"] - one[f"plain {way}"] for one in rounds[1:])
        for way in ("forward", "backward")
    )
    return MaskCost(max(0.0, forward), max(0.0, backward))


class Clock:
    """Seconds of named parts.

    On CUDA by events, so that nothing waits inside a step. Of one CPU thread, the processor's
    seconds: what other processes do meanwhile is not counted. Of several threads, the wall's.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        one_thread = torch.get_num_threads() == 1
        self._read = time.process_time if one_thread else time.perf_counter
        self.kind = "CUDA events" if self.on_cuda else "processor" if one_thread else "wall"
        self._spans: dict[str, list[Any]] = defaultdict(list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What happens inside belongs to `name`."""
        start = self._now()
        yield
        self._spans[name].append((start, self._now()))

    def seconds(self) -> dict[str, float]:
        """Of each part since the last call; waits for the device."""
        if self.on_cuda:
            torch.cuda.synchronize()
        found = {name: sum(map(self._between, spans)) for name, spans in self._spans.items()}
        self._spans.clear()
        return found

    def _now(self) -> Any:
        if not self.on_cuda:
            return self._read()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, span: tuple[Any, Any]) -> float:
        start, end = span
        seconds: float = start.elapsed_time(end) / 1e3 if self.on_cuda else end - start
        return seconds


def time_methods(owner: Any, parts: Mapping[str, str], clock: Clock) -> None:
    """From here on calls of methods of this one object belong to `parts` of the clock, by name."""

    def timed(method: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(method)
        def run(*arguments: Any, **options: Any) -> Any:
            with clock.part(part):
                return method(*arguments, **options)

        return run

    for method, part in parts.items():
        setattr(owner, method, timed(getattr(owner, method), part))
