"""What a user can ask to be measured of a model."""

from dataclasses import dataclass, field
from typing import Annotated

import tyro
from tyro.conf import Positional

from dotmoe.evaluate import EvaluateConfig, GenerateConfig
from dotmoe.load import LoadConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TasksConfig:
    """Benchmark tasks, run by lm-evaluation-harness."""

    tasks: tuple[str, ...] = ()
    """Run these: `paper` (its six tasks), `paper-by-k` (the five of its table over k), or tasks and
    groups by the harness's names (mmlu, gsm8k). What is finished is not run again."""
    task_data: str | None = None
    """Folder with the data of the tasks. Default: the hub."""
    shots: int | None = None
    """Solved examples before each question, for all tasks. Default: the paper's, else the
    harness's."""
    limit: int | None = None
    """Score only the first so many questions of each task, 1 or more; for trying out."""
    max_length: int | None = None
    """Tokens that the model may see at once, 2 to its context. Default: its context. Of `wikitext`
    it is the window of the rolling log-likelihood."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureConfig:
    """What to measure: perplexity of --text, unless --tasks, --word-perplexity, --fidelity or
    --generate asks for something else.
    """

    model: Annotated[Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Dense model, exported checkpoint, run folder, or (perplexity only) GGUF: the file, or the
    folder it was exported to."""
    against: str | None = None
    """Measure this model too, side by side. For --fidelity the dense model; default there: the one
    that MODEL was made from."""
    out: str | None = None
    """Folder to keep results in. Default for tasks: `6_evaluate` of a run, else
    `evaluation-MODEL`; the rest is only printed."""
    word_perplexity: tuple[int, ...] | None = None
    """Measure perplexity a word of --text, by rolling log-likelihood in windows of so many tokens;
    without numbers in the paper's of 2048, 4096, 8192 and 32768 that the context allows."""
    fidelity: bool = False
    """Compare hidden states, logits and FFN outputs with the dense model's on --text."""
    tokenizer: str | None = None
    """Model whose tokenizer cuts the text; for a GGUF only. Default: the one it was made from."""
    benchmark: TasksConfig = field(default_factory=TasksConfig)
    generation: GenerateConfig = field(default_factory=GenerateConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
