"""A real model aligned by the paper's recipe and by ours for equal tokens: what each state lost.

A part of `make gpu-evidence`. Runs lie in its work folder: a conversion that is stopped goes on.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import alignment_step
from dotmoe import DataConfig, LoadConfig, convert, finetune, finetune_recipe, recipe
from dotmoe.evaluate import EvaluateConfig, TextConfig, evaluate
from dotmoe.evaluate.config import TasksConfig
from dotmoe.files import read_json
from dotmoe.granularity import ExpertsConfig
from dotmoe.load import load_dense
from gpu_goals import ACTIVE, STATES
from random_models import Shape, random_layout, write_export, write_random_dense

RECIPES = ("default", "paper")
CURVE_POINTS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RealModel:
    """Which model, on what text, and how long."""

    gguf: tuple[Path, ...] = ()
    """The model's file, or its pieces in order. Left out: the part is not measured."""
    text: tuple[str, ...] = ()
    """Sources to train on, whose last blocks are held out, as `books` in the results."""
    wikitext: str = ""
    """WikiText-2's test text."""
    task_data: str | None = None
    """Folder of the tasks, as for `dotmoe evaluate --task-data`. Left out: no tasks."""
    tasks: tuple[str, ...] = ("paper",)
    asked: tuple[str, ...] = STATES[::-1]
    """States that are given the tasks, in order."""
    questions: int = 200
    """Of each task, at most."""
    steps: int | None = None
    """Of each alignment. Left out: as many as take `align_seconds`, all of them together."""
    align_seconds: float = 320
    active: tuple[float, ...] = ACTIVE
    """Shares of the FFN that run for a token."""
    expert_size: int = 32
    batch_size: int = 16
    seq_len: int = 2_048
    eval_tokens: int = 65_536
    """Of the held-out text."""
    wikitext_tokens: int | None = None
    """Left out: all."""
    repair_tokens: int | None = None


def points(
    real: RealModel, device: str, work: Path, results: Path
) -> dict[str, Callable[[], dict[str, Any]]]:
    """Pace first, then states of all conversions, then the tasks, as far as the time goes."""
    model = cache(partial(joined, real.gguf, work))
    load = LoadConfig(dtype="float32" if device == "cpu" else "bfloat16", device=device)
    steps = cache(lambda: read_json(results)["points"]["pace"]["found"]["steps"])
    common = {"batch_size": real.batch_size, "micro_batch_size": real.batch_size}

    def folder(name: str, active: float, state: str) -> Path:
        return work / f"{name}-{active}-{state}"

    def measured(name: str, active: float, state: str) -> dict[str, Any]:
        """The run of a state, made or finished, and WikiText-2."""
        out, tokens = str(folder(name, active, state)), real.batch_size * real.seq_len
        if state == "frozen":
            config = recipe(name, model=str(model()), out=out, load=load)
            made = convert(
                replace(
                    config,
                    experts=ExpertsConfig(expert_size=real.expert_size, active=active),
                    data=DataConfig(data=real.text, seq_len=real.seq_len),
                    align=replace(config.align, steps=steps(), **common),
                    eval_tokens=real.eval_tokens,
                )
            )
        else:
            config = finetune_recipe(run=str(folder(name, active, "frozen")), out=out, load=load)
            train = {"train": "repair"} if state == "repaired" else {}
            made = finetune(
                replace(
                    config,
                    data=DataConfig(seq_len=real.seq_len),
                    finetune=replace(
                        config.finetune, steps=max(1, steps() // 4), **common, **train
                    ),
                    repairing=replace(config.repairing, repair_tokens=real.repair_tokens),
                )
            )
        found = made.results
        losses = {"books": found["moe"]["loss"], "wikitext": wikitext(out)["loss"]}
        return {
            "loss": losses,
            "dense": found["dense"]["loss"],
            "steps": found["steps"],
            "tokens": found.get("tokens", found["steps"] * tokens),
            "verification": found["verification"],
            "curve": curve(Path(out)),
        }

    def wikitext(name: str) -> dict[str, Any]:
        return evaluate(
            EvaluateConfig(
                model=name,
                corpus=TextConfig(text=(real.wikitext,), max_tokens=real.wikitext_tokens),
                load=load,
            )
        )

    def tasks(name: str) -> dict[str, Any]:
        asked = TasksConfig(tasks=real.tasks, task_data=real.task_data, limit=real.questions)
        out = str(work / "tasks" / Path(name).name)
        found = evaluate(EvaluateConfig(model=name, benchmark=asked, load=load, out=out))
        scores = [s for task in found["model"]["tasks"].values() for s in task["scores"]]
        return {
            "accuracy": {s["task"]: s["value"] for s in scores if s["is_main"]},
            "stderr": {s["task"]: s["stderr"] for s in scores if s["is_main"]},
            "questions": real.questions,
        }

    def dense() -> dict[str, Any]:
        return {"loss": {"wikitext": wikitext(str(model()))["loss"]}}

    runs = [(name, active, state) for state in STATES for active in real.active for name in RECIPES]
    found = {"pace": partial(pace, real, model, load), "dense": dense}
    found |= {f"{n} {a} {s}": partial(measured, n, a, s) for n, a, s in runs}
    if real.task_data:
        found["dense, tasks"] = lambda: tasks(str(model()))
        found |= {
            f"{n} {a} {s}, tasks": partial(tasks, str(folder(n, a, s)))
            for s in real.asked
            for n, a, state in runs
            if s == state
        }
    return found


def pace(real: RealModel, model: Callable[[], Path], load: LoadConfig) -> dict[str, Any]:
    """Seconds of a step by each recipe, and how many steps the time is enough for."""
    dense = load_dense(str(model()), load)
    widths, config = dense.widths, dense.config
    heads = config.num_attention_heads, config.num_key_value_heads
    experts = widths.ffn // real.expert_size
    subject = alignment_step.Subject(
        shape=Shape(widths.model, widths.ffn, widths.layers, *heads, widths.vocabulary),
        experts=experts,
        active=experts // 2,
        seq_len=real.seq_len,
        micro_batch=real.batch_size,
        device=load.device,
    )
    seconds = {}
    for name in RECIPES:
        step = alignment_step.Step(subject, dense, seed=0, assignment=recipe(name).assignment)
        seconds[name] = min(step.taken()["step"] for _ in range(3))
    steps = real.steps or int(real.align_seconds / len(real.active) / sum(seconds.values()))
    return {"step_s": seconds, "steps": steps, "tokens": steps * real.batch_size * real.seq_len}


def curve(run: Path) -> list[dict[str, float]]:
    """Losses of the training at equal distances, each the mean of the steps since the last."""
    files = [run / stage / "metrics.jsonl" for stage in ("2_align", "4_finetune")]
    text = "".join(file.read_text(encoding="utf-8") for file in files if file.exists())
    rows = [json.loads(line) for line in text.splitlines()]
    size = -(-len(rows) // CURVE_POINTS)
    parts = [rows[start : start + size] for start in range(0, len(rows), max(1, size))]
    names = [name for name in ("kl", "ce") if rows and name in rows[0]]
    return [
        {"step": part[-1]["step"]} | {n: sum(r[n] for r in part) / len(part) for n in names}
        for part in parts
    ]


def joined(pieces: tuple[Path, ...], work: Path) -> Path:
    """One file of its pieces, made once."""
    if len(pieces) == 1:
        return pieces[0]
    whole = work / f"{pieces[0].name.partition('.gguf')[0]}.gguf"
    if not whole.exists() or whole.stat().st_size != sum(p.stat().st_size for p in pieces):
        whole.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
    return whole


def rehearsed(work: Path) -> RealModel:
    """A tiny random model in two pieces of a GGUF file, and a task of two questions."""
    shape = Shape(64, 96, 2, 4, 2, 264, 128)
    if not (work / "gguf").exists():
        write_random_dense(shape, work / "tiny", torch.float32, seed=0)
        layout = random_layout(shape, 4, 1, seed=0)
        write_export(work / "tiny", layout, work / "gguf", 64, 0, format="gguf_dense")
    (file,) = (work / "gguf").glob("*.gguf")
    whole, pieces = file.read_bytes(), [work / f"tiny.gguf.{n}" for n in (0, 1)]
    for piece, half in zip(pieces, (slice(10_000), slice(10_000, None)), strict=True):
        piece.write_bytes(whole[half])
    text = work / "text.txt"
    text.write_text("".join(f"The hen ate {n * 7 % 13} figs.\n" for n in range(500)))
    row = {"support": "Figs grow.", "question": "What grows?", "correct_answer": "figs"}
    row |= {f"distractor{n}": f"stone {n}" for n in (1, 2, 3)}
    (work / "questions" / "sciq").mkdir(parents=True, exist_ok=True)
    file = work / "questions" / "sciq" / "test.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 2, encoding="utf-8")
    return RealModel(
        gguf=tuple(pieces),
        text=(str(text),),
        wikitext=str(text),
        task_data=str(work / "questions"),
        tasks=("sciq",),
        asked=STATES[-1:],
        steps=1,
        active=ACTIVE[:1],
        expert_size=8,
        batch_size=2,
        seq_len=32,
        eval_tokens=256,
        wikitext_tokens=256,
        repair_tokens=512,
    )
