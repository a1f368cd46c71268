"""Work and time of one finetuning step against k, beside a step of the dense model.

    taskset -c 0 python benchmarks/finetune_step.py            # some million parameters, CPU

FLOPs are those that torch's own counter sees in forward and backward; the counter has no formula
for grouped products, so it is given one, and is checked against the loop over experts, whose plain
products it knows. All steps of a round run one after the other, and each time is compared with the
dense step's of the same round. The model is random, since neither depends on what it has learned.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from unittest.mock import patch

import torch
import tyro
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM

from dotmoe.files import write_json
from dotmoe.models.dense import DenseModel
from dotmoe.models.family import family_of
from dotmoe.moe import sparse
from dotmoe.moe.router import Routing
from dotmoe.provenance import provenance
from random_models import Shape, llama_config, random_layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What to measure."""

    width: int = 512
    ffn_width: int = 2_048
    layers: int = 2
    vocabulary: int = 4_096
    experts: int = 16
    tokens: int = 512
    """Of one step."""
    rounds: int = 7
    threads: int = 1
    out: Path = Path("results/finetune_step.json")
    seed: int = 0


def main() -> None:
    settings = tyro.cli(Settings)
    torch.set_num_threads(settings.threads)
    shape = Shape(
        width=settings.width,
        ffn_width=settings.ffn_width,
        layers=settings.layers,
        heads=settings.width // 64,
        kv_heads=settings.width // 64,
        vocabulary=settings.vocabulary,
    )
    generator = torch.Generator().manual_seed(settings.seed)
    tokens_BT = torch.randint(shape.vocabulary, (2, settings.tokens // 2), generator=generator)
    counts = [k for k in (1, 2, 4, 8, 12, 16, 32, 64) if k < settings.experts]
    counts.append(settings.experts)
    dense = random_dense(shape, settings.seed).model.requires_grad_(True)
    students = {k: student_of(shape, settings, k) for k in counts}
    passes: dict[str, Callable[[], Tensor]] = {
        "dense": lambda: dense(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
    }
    for k, student in students.items():
        passes[str(k)] = lambda student=student: (
            student(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
        )
    parameters = {"dense": list(dense.parameters())}
    parameters |= {str(k): list(student.parameters()) for k, student in students.items()}
    flops = {name: counted(loss) for name, loss in passes.items()}
    times = timed(passes, parameters, settings.rounds)
    rows = [row(settings, k, flops, times, passes[str(k)]) for k in counts]
    record = {
        "origin": "measured",
        "settings": {name: value for name, value in asdict(settings).items() if name != "out"},
        "parameters": sum(p.numel() for p in dense.parameters()),
        "dense": {"flops": flops["dense"], **{n: median(t) for n, t in times["dense"].items()}},
        "by_active_experts": rows,
        "provenance": provenance(settings.seed),
    }
    show(record)
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(settings.out, record)


def random_dense(shape: Shape, seed: int) -> DenseModel:
    config = llama_config(shape, attn_implementation="sdpa")
    torch.manual_seed(seed)
    return DenseModel(
        model=LlamaForCausalLM(config).requires_grad_(False).eval(),
        tokenizer=None,
        family=family_of(config),
        folder=Path(),
        source="random weights",
        revision=None,
    )


def student_of(shape: Shape, settings: Settings, active: int) -> torch.nn.Module:
    layout = random_layout(shape, settings.experts, active, settings.seed)
    dense = random_dense(shape, settings.seed)
    sparse.make_sparse(dense, layout, Routing(active_experts=active, surrogate="soft_top_k"))
    return dense.model.requires_grad_(True)


def grouped_flops(a_shape: tuple, b_shape: tuple, *_: object, **__: object) -> int:
    """Of aten::_grouped_mm: each row of the groups meets one matrix, whatever their number."""
    if len(b_shape) == 3:  # [R, A] with [E, A, B]
        return 2 * a_shape[0] * b_shape[1] * b_shape[2]
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]  # [A, R] with [R, B]


def counted(loss: Callable[[], Tensor]) -> int:
    """FLOPs of forward and backward."""
    formulas = {torch.ops.aten._grouped_mm: grouped_flops}
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        loss().backward()
    return counter.get_total_flops()


def counted_by_loop(loss: Callable[[], Tensor]) -> int:
    """The same with a loop over the experts that have tokens in place of grouped products."""
    with patch.object(sparse, "runs_grouped", lambda dtype, *widths: False):
        return counted(loss)


def timed(
    passes: dict[str, Callable[[], Tensor]], parameters: dict[str, list], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of forward and backward, and with AdamW, after one round that is not counted."""
    # A rate of zero: the work is done, and the weights stay as they are for the next round.
    optimizers = {name: torch.optim.AdamW(p, lr=0.0) for name, p in parameters.items()}
    found = {name: {"pass_s": [], "step_s": []} for name in passes}
    for one in range(rounds + 1):
        for name, loss in passes.items():
            optimizers[name].zero_grad()
            start = perf_counter()
            loss().backward()
            middle = perf_counter()
            optimizers[name].step()
            end = perf_counter()
            if one:
                found[name]["pass_s"].append(middle - start)
                found[name]["step_s"].append(end - start)
    return found


def row(
    settings: Settings,
    active: int,
    flops: dict[str, int],
    times: dict[str, dict[str, list[float]]],
    loss: Callable[[], Tensor],
) -> dict[str, float]:
    """What one k costs, and what it should cost by hand."""
    mine, dense = times[str(active)], times["dense"]
    # Three products of 2 T D n FLOPs forward; backward twice that. Routers are E rows.
    a_neuron = 3 * 3 * 2 * settings.tokens * settings.width * settings.layers
    neurons = settings.ffn_width // settings.experts * active
    routers = 3 * 2 * settings.tokens * settings.width * settings.experts * settings.layers
    elsewhere = flops["dense"] - a_neuron * settings.ffn_width
    return {
        "active_experts": active,
        "flops": flops[str(active)],
        "flops_of_the_loop": counted_by_loop(loss),
        "flops_by_hand": elsewhere + routers + a_neuron * neurons,
        "flops_of_experts": flops[str(active)] - elsewhere - routers,
        "flops_to_dense": flops[str(active)] / flops["dense"],
        **{name: median(mine[name]) for name in ("pass_s", "step_s")},
        "pass_to_dense": median(
            a / b for a, b in zip(mine["pass_s"], dense["pass_s"], strict=True)
        ),
        "step_to_dense": median(
            a / b for a, b in zip(mine["step_s"], dense["step_s"], strict=True)
        ),
    }


def median_ratio(seconds: list[float], dense: list[float]) -> float:
    return median(a / b for a, b in zip(seconds, dense, strict=True))


def show(record: dict) -> None:
    print("  k   FLOPs/dense   forward and backward/dense   step/dense   by hand  by loop")
    for line in record["by_active_experts"]:
        print(
            f"{line['active_experts']:>3}   {line['flops_to_dense']:>11.3f}   "
            f"{line['pass_to_dense']:>26.3f}   {line['step_to_dense']:>10.3f}   "
            f"{line['flops'] == line['flops_by_hand']!s:>7}  "
            f"{line['flops'] == line['flops_of_the_loop']!s:>7}"
        )


if __name__ == "__main__":
    main()
