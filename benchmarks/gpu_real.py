"""A real model is converted, finetuned by our recipe and the paper's, and asked questions.

A part of `gpu.py`. The folder of `--files` holds `model.gguf` or `model/`, `text.*`, and may hold
`heldout.*`, `humaneval.jsonl` and `gsm8k.jsonl` (also `.gz`), with the fields of the published
files. Commands are those of a user, with their options as they stand. The conversion is the bare
command, so a chat model writes its own text; a rehearsal without files takes the embedded model.
"""

import gzip
import json
import re
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from dotmoe.measure.evaluate.models import StockModel, loaded, model_folder
from dotmoe.measure.evaluate.programs import passes
from dotmoe.method.granularity import DEFAULT_ACTIVE
from dotmoe.models.chat import asked as question_ids
from dotmoe.models.chat import end_tokens, has_chats
from dotmoe.models.config import LoadConfig
from dotmoe.models.sampling import Sampling, continuations
from gpu_part import Asked, Part, asked, command, figures, loss_curve

STEPS, BATCH, LENGTH = 80, 32, 512
"""Steps of the finetuning, sequences of a step and their tokens: 1.3M tokens."""
OVERHEAD_SECONDS = 40
"""Time of a finetuning beside its steps: loading, export and evaluation."""
DTYPE = ("--dtype", "bfloat16")
"""For training: a GGUF file that was quantised is else computed in float32."""
PAPER_BATCH = 8
"""Sequences of a step of the paper's recipe, of 2,048 tokens: as many tokens as in ours."""
ALIGNED_SHARE = 3_500 * 64 / (3_500 * 64 + 4_578 * 128)
"""Share of the paper's tokens that its alignment reads; finetuning reads the others."""
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""Where an answer to HumanEval ends."""
MOST_QUESTIONS, ROWS = 164, 82
"""Questions of a file that are asked, as many as HumanEval has, and answers written at once."""
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
SUMS = [{"question": "What is 2 + 3?", "answer": "2 + 3 = 5\n#### 5"}]
PROGRAMS = [
    {
        "prompt": "def add(a, b):\n",
        "test": "def check(add):\n    assert add(2, 3) == 5\n",
        "entry_point": "add",
    }
]
"""Questions of a rehearsal without files."""


def main() -> None:
    options = asked(__doc__)
    model, text = subject(options)
    part, run = Part("real", options), partial(running, options)
    bare, tuned = options.scratch / "converted", options.scratch / "finetuned"
    part.measure("convert", partial(run, "convert", model, bare), most=170)
    size = ["--batch-size", BATCH, "--micro-batch-size", BATCH, "--seq-len", LENGTH, *DTYPE]
    data, steps = answers_and_text(bare, text), 3 if options.tiny else STEPS
    how = [*data, *size, "--steps", steps]
    ours = part.measure("finetune", partial(run, "finetune", bare, tuned, *how), most=80)
    paper = options.scratch / "paper"
    by_paper(part, run, (model, text), paper, steps)
    models: dict[str, str | Path] = {"dense": model, "converted": bare, "finetuned": tuned}
    models["paper"] = paper / "finetuned"
    for name in ("gsm8k", "humaneval"):
        questions = questions_of(options, name)
        for which, place in models.items():
            if questions and (which == "dense" or Path(place).exists()):
                ask = partial(answered, options, name, place, questions)
                part.measure(f"{name}, {which}", ask, most=30)
    left = part.left - OVERHEAD_SECONDS
    if ours and left > OVERHEAD_SECONDS and not options.tiny:
        steps = round(left / statistics.median(ours["step_seconds"]))
        out, how = options.scratch / "longer", [*data, *size, "--steps", steps]
        part.measure("finetune longer", partial(run, "finetune", bare, out, *how), most=part.left)


def answers_and_text(run: Path, text: str) -> list[object]:
    """Options of a finetuning on a text, half of it what the model wrote in a run, if it did."""
    answers = run / "0_answers/fitted.jsonl"
    if answers.exists():
        return ["--data", answers, text, "--data-weights", 1, 1]
    return ["--data", text]


def subject(options: Asked) -> tuple[str, str]:
    """The model and the text, as `dotmoe convert` takes them."""
    files = options.files
    if files is None:
        if options.tiny:
            return "embedded", "python-stdlib"
        raise SystemExit("Give --files FOLDER with model.gguf or model/, and text.*")
    models = [files / name for name in ("model.gguf", "model") if (files / name).exists()]
    texts = sorted(files.glob("text.*"))
    if not models or not texts:
        raise SystemExit(f"{files} needs model.gguf or model/, and text.*")
    return str(models[0]), str(texts[0])


def running(options: Asked, task: str, source: object, out: Path, *more: object) -> dict[str, Any]:
    """Figures of a command, and the losses of its training; a stopped one's losses are printed."""
    given = list(more)
    tiny: list[object] = []
    if options.tiny:
        tiny = tiny_options(task, more, subject(options)[1] if options.files else None)
        given = without(given, tiny)
    words: list[object] = [task, source, out, "--device", options.device, *given, *tiny]
    heldout = sorted(options.files.glob("heldout.*")) if options.files else []
    if heldout:  # else each recipe keeps other blocks of the text out
        words += ["--eval-text", *heldout]
    try:
        status = command("-m", "dotmoe", *words)
    finally:
        losses = loss_curve(out, "finetune" if task == "finetune" else "align")
        print(task, losses, flush=True)
    if status != 0:
        raise RuntimeError(f"dotmoe {task} ended with status {status}; {losses}")
    found = {"options": [str(word) for word in words], **figures(out), **losses}
    if found["tokens"]:
        found["tokens_per_s"] = found["tokens"] / sum(found["step_seconds"])
    return found


def without(words: list[object], others: list[object]) -> list[object]:
    """Options and their values without those that `others` give."""
    left, is_dropped = list[object](), False
    for word in words:
        if str(word).startswith("--"):
            is_dropped = word in others
        if not is_dropped:
            left.append(word)
    return left


def tiny_options(task: str, given: tuple[object, ...], text: str | None) -> list[object]:
    """Options that make a command short enough for a rehearsal; a CPU takes long to write text."""
    words: list[object] = ["--eval-tokens", 2_048, "--heldout-answers", 0]
    if task == "convert" and "--recipe" not in given:
        words += ["--repair-tokens", 2_048, "--calibration-tokens", 2_048, "--seq-len", 128]
        return [*words, "--data", text] if text else [*words, "--answer-tokens", 600]
    return [*words, "--seq-len", 128, "--batch-size", 2, "--micro-batch-size", 2]


def by_paper(part: Part, run: Any, subject: tuple[str, str], out: Path, steps: int) -> None:
    """The paper's alignment and finetuning on as many tokens of text as our finetuning reads.

    As many neurons run as by our default; batches are smaller than the paper's 64 and 128.
    """
    model, text = subject
    aligned = max(1, round(ALIGNED_SHARE * steps))
    how = ["--recipe", "paper", "--batch-size", PAPER_BATCH, "--data", text, *DTYPE, "--steps"]
    converted, share = out / "converted", ["--active", DEFAULT_ACTIVE]
    made = part.measure(
        "paper, convert", partial(run, "convert", model, converted, *how, aligned, *share), most=60
    )
    if made:
        tune = partial(run, "finetune", converted, out / "finetuned", *how, steps - aligned)
        part.measure("paper, finetune", tune, most=60)


def questions_of(options: Asked, name: str) -> list[dict[str, Any]]:
    """Rows of a file of questions, as long as there is one; a rehearsal has one row of its own."""
    if options.files:
        for file in sorted(options.files.glob(f"{name}.jsonl*")):
            opened = gzip.open if file.suffix == ".gz" else open
            with opened(file, "rt", encoding="utf-8") as lines:
                rows = [json.loads(line) for line in lines]
            return rows[: 2 if options.tiny else MOST_QUESTIONS]
    if options.tiny:
        return SUMS if name == "gsm8k" else PROGRAMS
    return []


def answered(
    options: Asked, name: str, place: str | Path, questions: list[dict[str, Any]]
) -> dict[str, Any]:
    """Share of the questions that a model answers rightly, and the tokens that it wrote a second.

    GSM8K asks by the chat template if there is one, and the last number is the answer. HumanEval
    continues a program. The most likely token is taken; no examples are given.
    """
    stock = loaded(model_folder(str(place)), LoadConfig(device=options.device))
    prompts = [prompt_of(stock, name, row) for row in questions]
    how = Sampling(temperature=0.0, new_tokens=16 if options.tiny else 256, rows=ROWS)
    started, written = time.perf_counter(), 0
    texts = dict[int, str]()
    ends = end_tokens(stock.model, stock.tokenizer)
    try:
        for made in continuations(stock.model, prompts, how, ends):
            texts[made.number] = stock.tokenizer.decode(made.ids, skip_special_tokens=True)
            written += len(made.ids)
    except TimeoutError:
        if not texts:
            raise
    seconds = time.perf_counter() - started
    rows = [questions[number] for number in texts]
    right = [*checked(name, rows, [*texts.values()])]
    return {
        "right": sum(right),
        "questions": len(right),
        "share": statistics.mean(right),
        "tokens_per_s": written / seconds,
        "first_answer": texts[min(texts)],
    }


def prompt_of(stock: StockModel, name: str, row: dict[str, Any]) -> list[int]:
    """Token ids of a question."""
    if name == "humaneval":
        return list(stock.tokenizer(row["prompt"].rstrip("\n") + "\n").input_ids)
    if has_chats(stock.tokenizer):
        return question_ids(stock.tokenizer, [{"role": "user", "content": row["question"]}])
    return list(stock.tokenizer(f"Question: {row['question']}\nAnswer:").input_ids)


def checked(name: str, rows: list[dict[str, Any]], texts: list[str]) -> Iterator[bool]:
    """Whether each answer is right."""
    if name == "humaneval":
        with ThreadPoolExecutor(8) as pool:
            yield from pool.map(passes, map(program_of, rows, texts))
        return
    for row, text in zip(rows, texts, strict=True):
        yield last_number(text.split("Question:")[0]) == last_number(row["answer"])


def program_of(row: dict[str, Any], text: str) -> str:
    """The program that an answer completes, with its test."""
    end = min((place for stop in STOPS if (place := text.find(stop)) >= 0), default=len(text))
    prompt = row["prompt"].rstrip("\n") + "\n"
    return f"{prompt}{text[:end]}\n{row['test']}\ncheck({row['entry_point']})"


def last_number(text: str) -> float | None:
    """The last number in a text."""
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


if __name__ == "__main__":
    main()
