"""The parts of `make gpu-evidence`: what each of its points measures, the most needed first.

Each part has two sizes: the real one, and a tiny one for the rehearsal on a CPU.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import alignment_step
import assignment
import finetune_step
import gpu_goals
import mask_kernels
import throughput_by_granularity as throughput
from dotmoe.export.verify import logits_error, logits_of, top1_agreement
from dotmoe.files import read_json
from dotmoe.load import LoadConfig, load_dense, load_weights
from dotmoe.moe.masked import masked_by
from dotmoe.transport import balanced_plan, greedy_assignment
from random_models import QWEN25_7B, Shape, random_layout, random_tokens, write_export
from random_models import write_random_dense as write_dense

Found = dict[str, Any]
Points = Mapping[str, Callable[[], Found]]
"""Functions that measure each point, by name, in order."""
ROOT = Path(__file__).resolve().parents[1]
STAGE = assignment.EVERY_SHAPE[-1]
TINY = Shape(64, 192, 2, 4, 2, 512, 256)
EXPORTED = Shape(512, 2_368, 4, 8, 2, 8_192)
TRAINED = finetune_step.Settings(
    shape=replace(QWEN25_7B, layers=4, vocabulary=8_192),
    experts=64,
    tokens=8_192,
    rounds=5,
    dtype="bfloat16",
    device="cuda",
)
SERVED = throughput.Settings(prompt_tokens=512, rounds=5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Size of the measurements, and the device; by default the real size."""

    device: str = "cuda"
    rounds: int = 3
    pytest: tuple[str, ...] = ("-m", "gpu")
    exported: Shape = EXPORTED
    split: tuple[int, int] = (148, 37)
    """Experts of the export, and how many of them are active."""
    tokens: int = 2_048
    shapes: tuple[tuple[int, int], ...] = gpu_goals.SHAPES
    """Neurons and experts to assign; the first is also compared with the CPU's solver."""
    masks: tuple[int, int, int] = (8_192, 18_944, 148)
    """Tokens, neurons and experts for the kernels, as in a forward pass of the step."""
    compiler: str = "inductor"
    calls: int = 8
    step: alignment_step.Subject = alignment_step.PRESETS["qwen25_7b"]
    finetune: finetune_step.Settings = TRAINED
    model: throughput.Preset = throughput.PRESETS["qwen25_7b"]
    serving: throughput.Settings = SERVED


REHEARSAL = Scale(
    device="cpu",
    rounds=1,
    pytest=("-k", "stay_away"),
    exported=TINY,
    split=(8, 2),
    tokens=64,
    shapes=tuple((4 * experts, experts) for _, experts in gpu_goals.SHAPES),
    masks=(1, 64, 4),
    compiler="aot_eager",
    calls=1,
    step=alignment_step.Subject(shape=TINY, experts=8, active=2, seq_len=32),
    finetune=finetune_step.Settings(shape=TINY, experts=8, tokens=32, rounds=1),
    model=throughput.Preset(
        shape=replace(TINY, ffn_width=2_368), dtype="float32", device="cpu", batch_sizes=(1, 2)
    ),
    serving=throughput.Settings(
        prompt_tokens=16, context_tokens=8, decode_steps=1, rounds=1, threads=1
    ),
)


def tests(at: Scale) -> Points:
    """Points that compare the device with the CPU, and the tests marked gpu."""
    return {
        "export": partial(exported, at),
        "solver": partial(solved, at),
        "pytest": partial(suite, at),
    }


def suite(at: Scale) -> Found:
    """Names of tests by outcome; run in this process, which has loaded what they need."""
    import pytest  # only if it is asked for

    found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}

    class Outcomes:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or not report.passed:
                found[report.outcome].append(report.nodeid)

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                found["failed"].append(report.nodeid)

    files = [str(f) for f in ROOT.glob("tests/*/test_*.py") if "mark.gpu" in f.read_text("utf-8")]
    options = ["-q", "-o", "addopts=", "--continue-on-collection-errors", *at.pytest]
    threads = torch.get_num_threads()
    if pytest.main([*options, *files], plugins=[Outcomes()]) == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    torch.set_num_threads(threads)  # the tests take one
    return found


def exported(at: Scale) -> Found:
    """Logits of an export in bfloat16 against the masked model, on the CPU and the device."""
    experts, active = at.split
    layout = random_layout(at.exported, experts, active, seed=0)
    tokens_BT = random_tokens(at.exported, 4, at.tokens // 4, seed=1)
    logits = {}
    with TemporaryDirectory() as scratch:
        source, out = Path(scratch) / "dense", Path(scratch) / "moe"
        write_dense(at.exported, source, torch.bfloat16, seed=0)
        record = write_export(source, layout, out, at.tokens, 0, device=at.device)
        for name, device in {"cpu": "cpu", "device": at.device}.items():
            dense = load_dense(str(source), LoadConfig(dtype="bfloat16", device=device))
            moe = load_weights(out, torch.bfloat16).to(device)
            with torch.no_grad():
                mine = logits_of(moe, tokens_BT)
                with masked_by(dense, layout):
                    expected = logits_of(dense.model, tokens_BT)
            logits[name] = {
                "error": float(logits_error(mine, expected).median()),
                "top1_agreement": top1_agreement(mine, expected),
            }
    ratio = logits["device"]["error"] / logits["cpu"]["error"]
    verification = record.verification_in_short()
    return {"verification": verification, "logits": logits, "error_to_cpu": ratio}


def solved(at: Scale) -> Found:
    """Largest difference from the CPU: plan, gradient (relative), and rounding of one plan."""
    case = case_of(at.shapes[0])
    affinity_NE = assignment.affinities(case.profile, case.num_neurons, case.num_experts, 0)
    gradient_NE = torch.randn(affinity_NE.shape, generator=torch.Generator().manual_seed(1))
    capacity, tau = case.num_neurons // case.num_experts, case.profile["tau"]
    found, plan_NE = [], None
    for device in ("cpu", at.device):
        leaf_NE = affinity_NE.to(device).requires_grad_()
        own_NE = balanced_plan(leaf_NE, capacity=capacity, tau=tau).plan
        (slope_NE,) = torch.autograd.grad(own_NE, leaf_NE, gradient_NE.to(device))
        plan_NE = own_NE.detach() if plan_NE is None else plan_NE
        expert_N = greedy_assignment(plan_NE.to(device), capacity=capacity)
        found.append([each.detach().cpu() for each in (own_NE, slope_NE, expert_N)])
    (plan, slope, expert), mine = found
    return {
        "plan": float((mine[0] - plan).abs().max()),
        "gradient": float((mine[1] - slope).norm() / slope.norm()),
        "rounding": float((mine[2] != expert).double().mean()),
    }


def case_of(shape: tuple[int, int]) -> assignment.Case:
    """A layer with the sharpest affinities of the profile."""
    profile = read_json(ROOT / "results" / "assignment_profile.json")["stages"][STAGE]
    return assignment.Case(num_neurons=shape[0], num_experts=shape[1], stage=STAGE, profile=profile)


def assigning(at: Scale) -> Points:
    """Points for layers of four models, and for the kernels."""
    device = torch.device(at.device)

    def one(shape: tuple[int, int]) -> Found:
        return assignment.compared(case_of(shape), at.rounds, device)

    def kernel(name: str) -> Found:
        from dotmoe.moe import triton_kernels  # only where triton is

        how = at.rounds, triton_kernels, at.compiler, at.calls
        return mask_kernels.compared(name, at.masks, device, *how)

    names = map(gpu_goals.named, gpu_goals.SHAPES)
    points = {name: partial(one, shape) for name, shape in zip(names, at.shapes, strict=True)}
    return {name: partial(kernel, name) for name in mask_kernels.KERNELS} | points


def aligning(at: Scale) -> Points:
    """One step."""
    return {"step": partial(alignment_step.measured, at.step, at.rounds, 0)}


def finetuning(at: Scale) -> Points:
    """Points for a finetuning step at each k / E."""
    experts = at.finetune.experts
    return {
        name: partial(finetune_step.measured, at.finetune, [experts // part])
        for name, part in gpu_goals.SHARES.items()
    }


def serving(at: Scale) -> Points:
    """Points for the native twin at each E, and the default format at the largest E."""
    dense = cache(partial(throughput.dense_of, at.model, 0))

    def one(form: str, experts: int) -> Found:
        settings = replace(at.serving, format=form)
        found = throughput.measured_at(settings, at.model, dense(), experts)
        return {name: found[name] for name in ("dense", "moe", "points", "settings", "granularity")}

    wanted = [("mixtral", experts) for experts in gpu_goals.EXPERTS]
    wanted.append(("glm4_moe", gpu_goals.EXPERTS[-1]))
    return {f"{form} {experts}": partial(one, form, experts) for form, experts in wanted}
