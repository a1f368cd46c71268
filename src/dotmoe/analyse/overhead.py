"""What an alignment step spends its time on (app:training_overhead)."""

from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from dotmoe.align import AlignConfig, Alignment
from dotmoe.analyse.clock import Clock, time_methods
from dotmoe.analyse.run import AnalysedRun
from dotmoe.artifacts import DenseModel
from dotmoe.config import RunConfig
from dotmoe.data import TokenBlocks
from dotmoe.export.architecture import granularity_of
from dotmoe.granularity import Granularity
from dotmoe.layout import ExpertLayout
from dotmoe.load import load_dense
from dotmoe.moe.assignment import AlignState, AssignmentConfig
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


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskCost:
    """Seconds that routing, masks and their estimators add to one FFN, beyond the dense one."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledRun:
    """The alignment whose steps are taken."""

    blocks: TokenBlocks
    state: AlignState
    """Where it starts: what the run has learned, so that plans are as sharp as they get."""
    granularity: Granularity
    align: AlignConfig
    assignment: AssignmentConfig
    seed: int


def values(run: AnalysedRun) -> dict[str, Any]:
    """`overhead_profile` of the run's alignment, from what it has learned."""
    folder = run.aligned
    assert folder is not None
    config = folder.config(RunConfig)
    layout = ExpertLayout.load(folder.verified("extract") / "layout.safetensors")
    dense = load_dense(config.model, run.config.load) if run.is_finetuned else run.dense
    profiled = ProfiledRun(
        blocks=Text.load(folder.verified("data")).training,
        state=AlignState.load(folder.verified("align") / "state.safetensors", dense.device),
        granularity=granularity_of(layout),
        align=config.align,
        assignment=config.assignment,
        seed=config.seed,
    )
    return overhead_profile(dense, profiled, run.config.profile_steps)


def says(values: dict[str, Any]) -> list[str]:
    """Shares of a step, largest first, and what the method adds."""
    shares = sorted(values["shares"].items(), key=lambda item: -item[1])
    parts = ", ".join(f"{part} {100 * share:.1f} %" for part, share in shares)
    return [
        f"{values['step_s']:.3f} s a step of {values['tokens_a_step']:,} tokens "
        f"({values['clock']}): {parts}",
        f"{', '.join(values['overhead_parts'])} add {100 * values['overhead']:.1f} % to the rest",
    ]


def overhead_profile(dense: DenseModel, run: ProfiledRun, num_steps: int) -> dict[str, Any]:
    """Mean seconds and shares of the parts of a step, from a few steps of a run's own config.

    Steps are those after the warm-up: temperature `tau_end`, half the peak rate. One more is taken
    first and not counted. `straight-through` is what masks, routers and estimators add to the FFNs,
    measured on one layer alone and taken out of `student forward` and `backward`; all parts and
    `other` make up the step.

    Args:
        dense: The dense model; left as it is.
        run: Text, state and config of the run; the state is left as it is.
        num_steps: Steps that are counted, 1 or more.

    Returns:
        `step_s`, `seconds` and `shares` by part, `overhead`: time of `OF_THE_METHOD` over that of
        everything else in the step, `steps`, `tokens_a_step`, `clock`.
    """
    config = run.align
    clock = Clock(dense.device)
    samples = _step_seconds(dense, run, num_steps, clock)
    mean = {part: sum(s.get(part, 0.0) for s in samples) / num_steps for part in samples[0]}
    step = mean.pop("step")
    cost = mask_cost(
        dense,
        run.granularity,
        min(config.micro_batch_size, config.batch_size) * run.blocks.seq_len,
        config.surrogate,
        clock,
    )
    seconds = _with_masks_apart(mean, cost, run, dense.widths.layers)
    seconds["other"] = max(0.0, step - sum(seconds.values()))
    of_method = sum(seconds.get(part, 0.0) for part in OF_THE_METHOD)
    return {
        "step_s": step,
        "seconds": seconds,
        "shares": {part: value / step for part, value in seconds.items()},
        "overhead": of_method / (step - of_method),
        "overhead_parts": [part for part in OF_THE_METHOD if part in seconds],
        "steps": num_steps,
        "tokens_a_step": config.batch_size * run.blocks.seq_len,
        "clock": clock.kind,
    }


def _step_seconds(
    dense: DenseModel, run: ProfiledRun, num_steps: int, clock: Clock
) -> list[dict[str, float]]:
    """Seconds of each part in each step."""
    config = run.align
    task = Alignment(
        dense,
        run.blocks,
        run.state,
        run.granularity,
        config,
        run.assignment,
        warmup_steps=0,
        seed=run.seed,
    )
    time_methods(task, OF_TASK, clock)
    time_methods(task.assignment, OF_ASSIGNMENT, clock)
    groups = task.parameter_groups()
    parameters = [p for group in groups for p in group.parameters.values()]
    optimizer = adamw(groups, weight_decay=config.weight_decay)
    samples = []
    with masked(dense, task.routing), recomputing(dense, config.activation_checkpointing):
        for step in range(num_steps + 1):
            with clock.part("step"):
                task.accumulate_gradients(step)
                with clock.part("optimizer"):
                    norm = global_norm(parameters)
                    update(optimizer, config.max_grad_norm, norm, MEAN_LR_FACTOR)
            samples.append(clock.seconds())
    return samples[1:]


def _with_masks_apart(
    mean: dict[str, float], cost: MaskCost, run: ProfiledRun, num_layers: int
) -> dict[str, float]:
    """The parts of a step with the cost of the masks taken out of forward and backward."""
    config = run.align
    passes = -(-config.batch_size // min(config.micro_batch_size, config.batch_size))
    times = passes * (num_layers - run.granularity.first_dense_layers)
    forward, backward = cost.forward_s * times, cost.backward_s * times
    if config.activation_checkpointing:  # the forward pass runs again in the backward pass
        backward += forward
    forward, backward = min(forward, mean["student forward"]), min(backward, mean["backward"])
    return mean | {
        "student forward": mean["student forward"] - forward,
        "backward": mean["backward"] - backward,
        STRAIGHT_THROUGH: forward + backward,
    }


def mask_cost(
    dense: DenseModel, split: Granularity, tokens: int, surrogate: Surrogate, clock: Clock
) -> MaskCost:
    """What masks and their estimators cost one FFN in one pass, by running it with and without.

    Only what lies between the projections is run, on random numbers, which cost what others do.

    Args:
        dense: Gives sizes, dtype and device.
        split: E and k.
        tokens: Tokens of one forward pass.
        surrogate: Of the router.
        clock: Takes the time.
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
    added = {
        way: median(one[f"masked {way}"] - one[f"plain {way}"] for one in rounds[1:])
        for way in ("forward", "backward")
    }
    return MaskCost(forward_s=max(0.0, added["forward"]), backward_s=max(0.0, added["backward"]))
