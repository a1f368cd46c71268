"""A real model aligned by the paper's recipe and by ours for equal tokens: the loss of each state.

A part of `make gpu-evidence`. Runs are kept in its work folder: a stopped conversion is resumed.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch

import alignment_step
from dotmoe import DataConfig, LoadConfig, convert, finetune, finetune_recipe, recipe
from dotmoe.evaluate import evaluate
from dotmoe.evaluate.models import EvaluateConfig, TextConfig
from dotmoe.files import read_json
from dotmoe.granularity import ExpertsConfig
from dotmoe.load import load_dense
from gpu_goals import ACTIVE, STATES
from random_models import Shape, random_layout, write_export, write_random_dense

RECIPES = ("default", "paper")
CURVE_POINTS = 20
RESULTS = Path("6_evaluate/results.json")
"""File in the folder of a finished run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RealModel:
    """Which model to measure, on what text, and for how long."""

    gguf: tuple[Path, ...] = ()
    """The model's file, or its pieces in order. Default: the part is not measured."""
    text: tuple[str, ...] = ()
    """Sources to train on. Their last blocks are held out, and called `books` in the results."""
    wikitext: str = ""
    """File with the test text of WikiText-2."""
    task_data: str | None = None
    """Folder of the tasks, as for `dotmoe evaluate --task-data`. Default: no tasks."""
    tasks: tuple[str, ...] = ("paper",)
    asked: tuple[str, ...] = STATES[::-1]
    """States that are evaluated on the tasks, in order."""
    questions: int = 200
    """Most questions of each task."""
    steps: int | None = None
    """Steps of each alignment. Default: as many as all alignments take in `align_seconds`."""
    align_seconds: float = 280
    active: tuple[float, ...] = ACTIVE
    """Shares of the FFN that run for a token."""
    expert_size: int = 32
    batch_size: int = 16
    seq_len: int = 2_048
    eval_tokens: int = 65_536
    """Tokens to score of the held-out text."""
    wikitext_tokens: int | None = None
    """Tokens to score of WikiText-2. Default: all."""
    repair_tokens: int | None = None


class Runs:
    """The runs of a real model: existing ones are kept, missing ones are made."""

    def __init__(self, real: RealModel, device: str, work: Path, results: Path) -> None:
        self.real, self.work, self.results = real, work, results
        self.load = LoadConfig(dtype="float32" if device == "cpu" else "bfloat16", device=device)

    def points(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Points: pace first, then the states of all conversions, then the tasks."""
        real = self.real
        found = {"pace": self.pace, "dense": self.dense}
        runs = [(n, a, s) for s in STATES for a in real.active for n in RECIPES]
        found |= {"{} {} {}".format(*run): partial(self.measured, *run) for run in runs}
        if real.task_data:
            found["dense, tasks"] = lambda: self.tasks(lambda: self.model)
            for state in real.asked:
                for run in runs:
                    if run[2] == state:
                        made = partial(self.made, *run)
                        found["{} {} {}, tasks".format(*run)] = partial(self.tasks, made)
        return found

    @cached_property
    def model(self) -> Path:
        """The model's file."""
        return joined(self.real.gguf, self.work)

    def pace(self) -> dict[str, Any]:
        """Seconds per step of each recipe, and the number of steps that fit the time."""
        real, dense = self.real, load_dense(str(self.model), self.load)
        widths, config = dense.widths, dense.config
        heads = config.num_attention_heads, config.num_key_value_heads
        experts = widths.ffn // real.expert_size
        subject = alignment_step.Subject(
            shape=Shape(widths.model, widths.ffn, widths.layers, *heads, widths.vocabulary),
            experts=experts,
            active=experts // 2,
            seq_len=real.seq_len,
            micro_batch=real.batch_size,
            device=self.load.device,
        )
        step_s = {}
        for name in RECIPES:
            step = alignment_step.Step(subject, dense, seed=0, assignment=recipe(name).assignment)
            step_s[name] = min(step.taken()["step"] for _ in range(3))
        steps = real.steps or int(real.align_seconds / len(real.active) / sum(step_s.values()))
        return {"step_s": step_s, "steps": steps, "tokens": steps * real.batch_size * real.seq_len}

    def made(self, name: str, active: float, state: str) -> Path:
        """Folder of the run of a state; it is made if missing."""
        real, out = self.real, self.work / f"{name}-{active}-{state}"
        if (out / RESULTS).exists():
            return out
        steps = read_json(self.results)["points"]["pace"]["found"]["steps"]
        batch: dict[str, Any] = {"batch_size": real.batch_size, "micro_batch_size": real.batch_size}
        if state == "frozen":
            config = recipe(name, model=str(self.model), out=str(out), load=self.load)
            align = replace(config.align, steps=steps, **batch)
            experts = ExpertsConfig(expert_size=real.expert_size, active=active)
            data = DataConfig(data=real.text, seq_len=real.seq_len)
            tokens = real.eval_tokens
            config = replace(config, align=align, experts=experts, data=data, repair=False)
            convert(replace(config, eval_tokens=tokens))
        else:
            source = self.made(name, active, "frozen")
            tuning = finetune_recipe(run=str(source), out=str(out), load=self.load)
            train: Literal["repair", "everything"] = (
                "repair" if state == "repaired" else "everything"
            )
            tuned = replace(tuning.finetune, train=train, steps=max(1, steps // 4), **batch)
            repairing = replace(tuning.repairing, repair_tokens=real.repair_tokens)
            data = DataConfig(seq_len=real.seq_len)
            finetune(replace(tuning, finetune=tuned, repairing=repairing, data=data))
        return out

    def measured(self, name: str, active: float, state: str) -> dict[str, Any]:
        """Losses of a state in nats per token, and how it was made."""
        out = self.made(name, active, state)
        found = read_json(out / RESULTS)
        return {
            "loss": {"books": found["moe"]["loss"], "wikitext": self.wikitext(out)},
            "dense": found["dense"]["loss"],
            "steps": found["steps"],
            "tokens": found["steps"] * self.real.batch_size * self.real.seq_len,
            "verification": found["verification"],
            "curve": curve(out),
        }

    def dense(self) -> dict[str, Any]:
        """Loss of the dense model on WikiText-2; every state's point has its loss on the books."""
        return {"loss": {"wikitext": self.wikitext(self.model)}}

    def wikitext(self, model: Path) -> float:
        """Nats per token on WikiText-2."""
        text = TextConfig(text=(self.real.wikitext,), max_tokens=self.real.wikitext_tokens)
        found = evaluate(EvaluateConfig(model=str(model), corpus=text, load=self.load))
        return float(found["loss"])

    def tasks(self, made: Callable[[], Path]) -> dict[str, Any]:
        """Accuracy of each task, and its standard error."""
        model, real = made(), self.real
        config = EvaluateConfig(
            model=str(model),
            tasks=real.tasks,
            task_data=real.task_data,
            limit=real.questions,
            load=self.load,
            out=str(self.work / "tasks" / model.name),
        )
        rows = evaluate(config)["model"]["tasks"].values()
        scores = [score for row in rows for score in row["scores"] if score["is_main"]]
        found = {"accuracy": "value", "stderr": "stderr", "questions": "questions"}
        return {name: {s["task"]: s[key] for s in scores} for name, key in found.items()}


def curve(run: Path) -> list[dict[str, float]]:
    """Training losses at equal distances, each the mean over the steps since the last."""
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
    """One file joined from its pieces, made once."""
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
