"""What a campaign will take: hours of each row and each of its measures, before it starts.

Conversions and finetunings are those of `dotmoe inspect` on this machine. Pruning and measures
follow from two rates that a short probe of the dense model gives: tokens that it reads and tokens
that it writes in a second. A measure that is made for one row already is expected to take as long
for the others, and a finished one takes nothing.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import torch

import dotmoe
from campaign_rows import Amounts, Plan, Row
from dotmoe.common.tables import Table, in_time, table_of
from dotmoe.measure.config import InspectConfig
from dotmoe.measure.evaluate.models import StockModel, loaded, model_folder
from dotmoe.measure.inspection import inspect_model, stored_dtype
from dotmoe.measure.inspection.accelerators import measured_here
from dotmoe.models.config import LoadConfig
from dotmoe.models.read_config import dense_config
from dotmoe.models.sampling import Sampling, continuations
from dotmoe.models.scoring import loss_of

ANSWER_TOKENS = 250
"""Tokens of an answer to a question, about as SmolLM2 and Qwen2.5-Coder write them."""
QUESTION_TOKENS = 1_275
"""Tokens of a question with all its choices, summed over the paper's six tasks, about."""
HUMANEVAL_QUESTIONS = 164
PRUNING_PASSES = 4
"""SparseGPT in forward passes over its text, about: two of them, and its products of inputs."""
SPEED_HOURS = 0.1
"""Hours of a measure of speed, assumed."""
_HELDOUT_SETS = 4
"""Sets of held-out answers: of two kinds, without and with a penalty on repetition."""
PROBE_ROWS, PROBE_TOKENS, PROBE_WRITTEN = 4, 512, 12


class Rates(NamedTuple):
    """Tokens a second of the dense model on this machine."""

    read: float
    written: float
    """Of as many answers at once as a task writes."""


@torch.no_grad()
def probed(model: str, dtype: str) -> Rates:
    """The rates of the dense model, by reading and writing for some seconds."""
    stock = loaded(model_folder(model), LoadConfig(dtype=dtype))  # type: ignore[arg-type]
    length = min(PROBE_TOKENS, stock.context)
    vocabulary = int(stock.model.config.vocab_size)
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(vocabulary, (PROBE_ROWS, length), generator=generator)
    loss_of(stock.model, tokens_BT[:1, :32])  # warms up
    started = seconds()
    loss_of(stock.model, tokens_BT)
    read = tokens_BT.numel() / (seconds() - started)
    return Rates(read=read, written=_written(stock, tokens_BT))


def _written(stock: StockModel, tokens_BT: torch.Tensor) -> float:
    """Tokens that the model writes in a second, after short prompts."""
    how = Sampling(temperature=0.0, new_tokens=PROBE_WRITTEN)
    prompts = [row[:32].tolist() for row in tokens_BT] * (how.rows // len(tokens_BT))
    started = seconds()
    made = list(continuations(stock.model, prompts, how, ends=()))
    return sum(len(each.ids) for each in made) / (seconds() - started)


def seconds() -> float:
    """Time as this process has it, all threads at work: other processes do not count."""
    return time.process_time() / torch.get_num_threads()


class Expected:
    """Hours that rows and measures of one campaign are expected to take."""

    def __init__(self, model: str, plan: Plan, rows: Iterable[Row], rates: Rates) -> None:
        self.model, self.plan, self.rates = model, plan, rates
        self.rows = {row.name: row for row in rows}
        self._config, folder = dense_config(model)
        self._stored = stored_dtype(self._config, folder)
        dtype = torch.bfloat16 if plan.dtype == "bfloat16" else torch.float32
        self._here = measured_here(torch.device("cpu"), dtype)
        self._inspected = cache(self._inspect)

    def answers(self, rows: Iterable[Row], made: Collection[Row] = ()) -> float:
        """Hours in which the dense model writes the text of rows, each once for all of them."""
        amounts, left = self.plan.amounts, [row for row in rows if row not in made]
        tokens = 0
        if left and not any(row.by == "convert" for row in made):
            tokens += max(_own_tokens(row) for row in left)
            tokens += _HELDOUT_SETS * amounts.heldout_answers * ANSWER_TOKENS
        if not any(row.by == "finetune" for row in made):
            tokens += max((_tokens(row) for row in left if row.by == "finetune"), default=0)
        return tokens / self.rates.written / 3_600

    def row(self, row: Row) -> float:
        """Hours to make a row, without what it is made of."""
        if row.by == "nothing":
            return 0.0
        if row.by in ("quantise", "drop_idle"):
            return self._export(row)
        if row.by == "prune":
            tokens = row.options["calibration_tokens"]
            return float(PRUNING_PASSES * tokens / self.rates.read / 3_600)
        if row.by == "finetune":
            return self._finetuning(row)
        plan = self._inspected(tuple(sorted(row.given.items())))
        stages = plan["conversions"][0]["stages"]
        # The rows share their own answers, which `answers` counts.
        return sum(each["hours"] or 0.0 for each in stages if each["stage"] != "answers")

    def _finetuning(self, row: Row) -> float:
        """Hours of a finetuning, by the planned speed of its recipe."""
        assert row.of is not None
        options = row.options
        source = dict(self.rows[row.of].given)
        source["finetune_recipe"] = options.get("recipe", "default")
        plan = self._inspected(tuple(sorted(source.items())))
        (how,) = (p for p in plan["plans"] if p["task"] == "finetune" and p["gpu"] == "this CPU")
        best = how["recommended"] or how["choices"][-1]
        return float(_tokens(row) / best["tokens_per_s"] / 3_600)

    def _export(self, row: Row) -> float:
        """Hours of another export of the run that a row is made of."""
        assert row.of is not None
        plan = self._inspected(tuple(sorted(self.rows[row.of].given.items())))
        stages = {each["stage"]: each["hours"] for each in plan["conversions"][0]["stages"]}
        return float(stages["export"])

    def _inspect(self, options: tuple[tuple[str, Any], ...]) -> Mapping[str, Any]:
        """What `dotmoe inspect` says of a conversion and a finetuning of it."""
        given = dict(options)
        recipe, tuned = given.pop("recipe", "default"), given.pop("finetune_recipe", None)
        run = dotmoe.recipe(recipe, model=self.model, out="", **given)
        groups = {each.name: getattr(run, each.name) for each in fields(run)}
        config = InspectConfig(**groups, finetune_recipe=tuned)
        return inspect_model(self._config, config, stored=self._stored, here=self._here)

    def measure(self, name: str) -> float:
        """Hours of a measure of one row, by the rates of the dense model."""
        how: Amounts = self.plan.amounts
        written = {
            "answers": _HELDOUT_SETS * how.heldout_answers * ANSWER_TOKENS,
            "gsm8k": how.questions * ANSWER_TOKENS,
            "humaneval": min(how.questions, HUMANEVAL_QUESTIONS) * ANSWER_TOKENS,
        }
        read = dict.fromkeys(("wiki", "books", "python"), how.windows * how.window)
        read["tasks"] = how.questions * QUESTION_TOKENS
        if name in written:
            return written[name] / self.rates.written / 3_600
        if name in read:
            return read[name] / self.rates.read / 3_600
        return SPEED_HOURS if name in ("llama_cpp", "vllm") else 0.0


def _tokens(row: Row) -> int:
    """Tokens that a finetuning reads."""
    tokens: int = row.options["steps"] * row.options["batch_size"] * row.options["seq_len"]
    return tokens


def _own_tokens(row: Row) -> int:
    """Tokens of own answers that a conversion or a pruned model is fitted to."""
    if row.by not in ("convert", "prune"):
        return 0
    if row.options.get("steps"):
        return _tokens(row)
    tokens: int = row.options.get("answer_tokens", 0)
    return tokens


class Line(NamedTuple):
    """A line of a plan: hours to make a row and of its measures; 0 for what is finished."""

    name: str
    what: str
    make: float
    measures: dict[str, float]

    @property
    def hours(self) -> float:
        """All of it."""
        return self.make + sum(self.measures.values())


def measured_hours(seconds: Iterable[float]) -> float | None:
    """Hours that a measure took for other rows; None if it was never made."""
    found = [*seconds]
    return median(found) / 3_600 if found else None


def table(lines: Iterable[Line], answers: float, rates: Rates) -> Table:
    """The plan as a table, with a line for the text that all rows share, and the sum."""
    lines = [Line("own answers", "text of all rows, written once", answers, {}), *lines]
    lines.append(Line("all", "", sum(each.hours for each in lines), {}))
    return table_of(
        lines,
        {
            "row": lambda line: line.name,
            "what": lambda line: line.what,
            "make": lambda line: _shown(line.make),
            "measure": lambda line: _shown(sum(line.measures.values())) if line.measures else None,
        },
        words=2,
        title="Rows, and the time that each is expected to take",
        note=f"{sum(len(line.measures) for line in lines)} measures. The dense model reads "
        f"{rates.read:,.0f} tokens a second here, and writes {rates.written:,.0f}.",
    )


def _shown(hours: float) -> str:
    return in_time(hours) if hours else "done"
