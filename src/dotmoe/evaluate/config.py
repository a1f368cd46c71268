"""What `dotmoe evaluate` can be asked to measure, and how."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from dotmoe.errors import UserError
from dotmoe.load import LoadConfig
from dotmoe.options import above, at_least, at_most


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """Text to measure on, and how it is cut into windows."""

    text: tuple[str, ...] = ()
    """Files or other sources, as `data` takes them."""
    window: Annotated[int | None, at_least(2)] = None
    """Tokens of a window, 2 to the model's context. Default: 2048, or the whole context if less."""
    max_tokens: Annotated[int | None, at_least(2)] = None
    """Read no more tokens than this, 2 or more. Default: the whole text."""
    protocol: Literal["packed", "gptq"] = "packed"
    r"""How text becomes windows. packed: documents joined as for training. gptq: lines joined by
    "\n\n" and tokenised whole, an unfilled last window dropped, as papers on quantisation and
    pruning measure WikiText-2."""
    batch_size: Annotated[int | Literal["auto"], at_least(1)] = "auto"
    """Texts a forward pass, 1 or more. auto: found for tasks on a GPU; else 8 windows, 16 requests;
    fewer requests run at once where the vocabulary is large."""

    def window_in(self, context: int) -> int:
        """Tokens of a window for a model of this context; `UserError` if it is longer."""
        window = min(2048, context) if self.window is None else self.window
        if window > context:
            raise UserError(
                f"window is {window}, but must lie in 2 to {context}, the model's context. "
                "Choose one."
            )
        return window

    @property
    def windows_at_once(self) -> int:
        """Windows a forward pass."""
        return 8 if self.batch_size == "auto" else self.batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class TasksConfig:
    """Benchmark tasks, run by lm-evaluation-harness."""

    tasks: tuple[str, ...] = ()
    """Run these: `paper` (its six tasks), `paper-by-k` (the five of its table over k), or tasks and
    groups by the harness's names (mmlu, gsm8k). What is finished is not run again."""
    task_data: str | None = None
    """Folder with the data of the tasks. Default: the hub."""
    shots: Annotated[int | None, at_least(0)] = None
    """Solved examples before each question, for all tasks. Default: the paper's, else the
    harness's."""
    limit: Annotated[int | None, at_least(1)] = None
    """Score only the first so many questions of each task, 1 or more; for trying out."""
    max_length: Annotated[int | None, at_least(2)] = None
    """Tokens that the model may see at once, 2 to its context. Default: its context. Of `wikitext`
    it is the window of the rolling log-likelihood."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """What is generated from, and how tokens are sampled."""

    generate: Annotated[int | None, at_least(1)] = None
    """Continue prompts by up to this many tokens, greedily and sampled; report samples, side by
    side with those of --against, and how much of them repeats."""
    prompts: tuple[str, ...] = ()
    """Prompts. Default: beginnings cut from --text at equal distances."""
    num_prompts: Annotated[int, at_least(1)] = 16
    """Prompts cut from the text."""
    prompt_tokens: Annotated[int, at_least(1)] = 32
    """Tokens of a prompt cut from the text."""
    temperature: Annotated[float, above(0)] = 1.0
    """Of sampling, above 0."""
    top_p: Annotated[float, above(0), at_most(1)] = 0.95
    """Sample among the likeliest tokens that have this probability together, above 0, up to 1."""
    sampling_seed: Annotated[int, at_least(0)] = 0
    """Of sampling; each prompt has one of its own, the same for both models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """What to measure: perplexity of --text, unless --tasks, --word-perplexity, --fidelity,
    --generate or --curve asks for something else.
    """

    model: Annotated[Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Dense model (a GGUF file too), exported checkpoint, run folder, or (perplexity only) exported
    GGUF: the file, or its folder."""
    against: str | None = None
    """Measure this model too, side by side. For --fidelity the dense model; default there: the one
    that MODEL was made from."""
    out: str | None = None
    """Folder to keep results in. Default for tasks: `6_evaluate` of a run, else
    `evaluation-MODEL`; the rest is only printed."""
    json: bool = False
    """Print JSON instead of tables."""
    word_perplexity: Annotated[tuple[int, ...] | None, at_least(1)] = None
    """Measure perplexity a word of --text, by rolling log-likelihood in windows of so many tokens;
    without numbers in the paper's of 2048, 4096, 8192 and 32768 that the context allows."""
    fidelity: bool = False
    """Compare hidden states, logits and FFN outputs with the dense model's on --text."""
    curve: Annotated[tuple[int, ...] | None, at_least(1)] = None
    """Measure an export at these k, and at k = E; without numbers at a ladder of them."""
    plot: str | None = None
    """Draw the curve into this file: .svg, .png or .pdf."""
    tokenizer: str | None = None
    """Model whose tokenizer cuts the text, for a GGUF to run in llama.cpp. Default: the one that
    an exported GGUF was made from; any other GGUF is read by Transformers."""
    corpus: TextConfig = field(default_factory=TextConfig)
    benchmark: TasksConfig = field(default_factory=TasksConfig)
    generation: GenerateConfig = field(default_factory=GenerateConfig)
    load: LoadConfig = field(default_factory=LoadConfig)

    @property
    def names(self) -> dict[str, str]:
        """Models to measure as the user named them, as `model` and `against`."""
        return {"model": self.model} | ({"against": self.against} if self.against else {})

    @property
    def measurement(self) -> str:
        """Name of the one measurement that is asked for, a key of `MEASUREMENTS`."""
        given = {
            "tasks": bool(self.benchmark.tasks),
            "word_perplexity": self.word_perplexity is not None,
            "fidelity": self.fidelity,
            "generation": self.generation.generate is not None,
            "curve": self.curve is not None,
        }
        asked = [name for name, is_given in given.items() if is_given]
        if len(asked) > 1:
            options = " and ".join(f"--{name.replace('_', '-')}" for name in asked)
            options = options.replace("--generation", "--generate")
            raise UserError(f"{options} ask for two measurements. Give one of them at a time.")
        return asked[0] if asked else "perplexity"

    def check_together(self) -> None:
        """Raise a `UserError` for two measurements at once, one without text, or a plot alone."""
        if self.plot is not None and self.curve is None:
            raise UserError("--plot draws a curve, and --curve is not given. Give both.")
        prompted = self.measurement == "generation" and self.generation.prompts
        if not (self.corpus.text or prompted or self.measurement == "tasks"):
            other = ", or --prompts" * (self.measurement == "generation")
            raise UserError(f"--text names no file. Give a text to measure on{other}.")
