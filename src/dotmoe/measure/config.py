"""Options of the commands that measure or plan."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from dotmoe.common.errors import UserError
from dotmoe.common.files import Values
from dotmoe.common.options import ARGUMENT, HOW, PLACE, Need, Shown, at_least
from dotmoe.method.config import Train
from dotmoe.models.config import LoadConfig, is_gguf
from dotmoe.run import needs as needs_of
from dotmoe.run.config import RunConfig


def in_context(
    name: str, tokens: int, context: int, least: int = 2, remedy: str = "Choose one."
) -> int:
    """Return `tokens`; raises `UserError` if they exceed the context of the model."""
    if tokens > context:
        raise UserError(
            f"{name} is {tokens}, but must lie in {least} to {context}, the model's context. "
            f"{remedy}"
        )
    return tokens


def _has_gguf(name: str) -> bool:
    """Whether a model is a GGUF file, or a folder with one."""
    path = Path(os.path.expanduser(name))  # a user's home may be unknown
    return is_gguf(path) or any(map(is_gguf, path.glob("*")))


_LOWEST_TEMPERATURE = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """Text to measure on, and how it is cut into windows."""

    text: Annotated[tuple[str, ...], Shown("SOURCE")] = ()
    """Text to measure on: files or other sources, named as for `--data` of convert."""
    window: Annotated[int | None, at_least(2)] = None
    """Tokens per window, 2 to the model's context. Default: 2048, or the context if it is less."""
    max_tokens: Annotated[int | None, at_least(2)] = None
    """Read no more tokens than this, 2 or more. Default: the whole text."""
    protocol: Literal["packed", "gptq"] = "packed"
    r"""How text becomes windows. packed: documents joined as for training. gptq: lines joined by
    "\n\n" and tokenised whole, an unfilled last window dropped, as papers on quantisation and
    pruning measure WikiText-2."""
    batch_size: Annotated[int | Literal["auto"], at_least(1)] = "auto"
    """Windows, or requests of tasks, per forward pass, 1 or more. auto: 8 windows; 16 requests on a
    CPU, fewer if their logits need much memory; on a GPU as many requests as fit."""

    def window_in(self, context: int) -> int:
        """Tokens per window for a model with this context; raises `UserError` if it is longer."""
        return in_context("window", self.window or min(2048, context), context)

    @property
    def windows_at_once(self) -> int:
        """Number of windows per forward pass."""
        return 8 if self.batch_size == "auto" else self.batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """What to measure."""

    needs: ClassVar[tuple[Need, ...]] = (
        Need(("task_data", "shots", "limit", "max_length"), "--tasks", lambda asked: asked.tasks),
        Need(("prompts", "temperature"), "--generate", lambda asked: asked.generate),
        Need(
            ("chat_template", "repetition_penalty"),
            "--tasks or --generate",
            lambda asked: asked.tasks or asked.generate,
        ),
        Need(("window", "max_tokens", "protocol"), "--text", lambda asked: asked.corpus.text),
        Need(
            ("batch_size",),
            "--text or --tasks",
            lambda asked: asked.corpus.text or asked.tasks,
        ),
        Need(
            ("tokenizer",),
            "a GGUF file",
            lambda asked: any(map(_has_gguf, asked.names.values())),
            "{option} is {value}, but no model is a GGUF file. Name one",
        ),
    )

    model: Annotated[str, ARGUMENT]
    """Dense model (folder, hub name or GGUF file), exported checkpoint, run folder, or, for
    perplexity only, an exported GGUF (the file or its folder)."""
    against: Annotated[str | None, Shown("MODEL")] = None
    """Second model to measure, side by side with MODEL. For --fidelity: the dense model, by default
    the one that MODEL was made from (of a local one, only a run folder knows the path)."""
    out: Annotated[str | None, Shown("FOLDER"), PLACE] = None
    """Folder to write results to. Default for tasks: `6_evaluate` of a run, else
    `evaluation-MODEL-` and 8 digits of what identifies it; other results are only printed."""
    json: bool = False
    """Print JSON instead of tables."""
    tasks: Annotated[tuple[str, ...], Shown("TASK")] = ()
    """Benchmark tasks to run with lm-evaluation-harness: `paper` (the paper's six), `paper_by_k`
    (the five of its table over k), or tasks and groups by the harness's names (mmlu, gsm8k).
    Finished tasks are not run again."""
    task_data: Annotated[str | None, Shown("FOLDER"), PLACE] = None
    """Folder with the data of --tasks. Default: download them from the hub."""
    shots: Annotated[int | None, at_least(0)] = None
    """Number of solved examples before each question of --tasks. Default: the paper's number, else
    the harness's."""
    limit: Annotated[int | None, at_least(1)] = None
    """Score only the first questions of each of --tasks, this many, 1 or more; for a trial."""
    chat_template: bool = False
    """Give questions of --tasks, and --prompts, through the model's chat template, as chat models
    expect."""
    max_length: Annotated[int | None, at_least(2)] = None
    """Tokens that the model may see at once in --tasks, 2 to its context. Default: its context. In
    `wikitext` this is the window of the rolling log-likelihood."""
    fidelity: bool = False
    """Compare hidden states, logits and FFN outputs with the dense model's on --text."""
    generate: Annotated[int | None, at_least(1)] = None
    """Continue prompts by up to this many tokens, side by side with the model of --against."""
    temperature: Annotated[float, at_least(0)] = 0.0
    """Temperature of --generate; 0: the most likely token at every step. Seed of samples: 0."""
    repetition_penalty: Annotated[float, at_least(1.0)] = 1.0
    """Divide the logits of tokens that are in the text already by this, as servers do by
    `repetition_penalty` in `generation_config.json`: of --generate, and of answers to --tasks; 1:
    none. The model's own settings are ignored, so that two models are compared by one."""
    prompts: tuple[str, ...] = ()
    """Prompts of --generate."""
    curve: Annotated[tuple[int, ...] | None, at_least(1)] = None
    """Measure perplexity of an export on --text at these k, and at k = E. Without numbers: 1, 2,
    3, 4 and 6 eighths of E, and its own k."""
    tokenizer: Annotated[str | None, Shown("MODEL")] = None
    """Model whose tokenizer is used for a GGUF that runs in llama.cpp. Default: the hub model that
    an exported GGUF was made from; without this option Transformers reads any other GGUF."""
    corpus: TextConfig = field(default_factory=TextConfig)
    load: LoadConfig = field(default_factory=LoadConfig)

    @property
    def names(self) -> dict[str, str]:
        """Names of the models to measure as the user gave them, as `model` and `against`."""
        return {"model": self.model} | ({"against": self.against} if self.against else {})

    @property
    def measurements(self) -> list[str]:
        """Names of what is to be measured, keys of `MEASUREMENTS`, each in its own result file."""
        options = {
            "tasks": self.tasks or None,
            "fidelity": self.fidelity or None,
            "generation": self.generate,
            "curve": self.curve,
        }
        chosen = [name for name, option in options.items() if option is not None]
        reads = self.fidelity or self.curve is not None
        return ["perplexity", *chosen] if self.corpus.text and not reads else chosen

    def check_together(self) -> None:
        """Refuse no measurement, one without what it needs, and a file as `out`."""
        if 0 < self.temperature < _LOWEST_TEMPERATURE:
            raise UserError(
                f"--temperature is {self.temperature:g}, which overflows. Give 0, or at least "
                f"{_LOWEST_TEMPERATURE:g}."
            )
        if self.generate and not self.prompts:
            raise UserError("--generate has nothing to continue. Give --prompts.")
        reads = self.fidelity or self.curve is not None
        if reads and not self.corpus.text:
            option = "--fidelity" if self.fidelity else "--curve"
            raise UserError(f"{option} reads text, but --text names no file. Give --text FILE.")
        if not (self.corpus.text or self.tasks or self.generate):
            raise UserError(
                "there is nothing to measure. Give --text FILE, --tasks NAME, or --generate N with "
                "--prompts TEXT."
            )
        if self.curve is not None and self.against:
            raise UserError(
                f"--curve measures MODEL alone, but --against names {self.against}. Leave it out."
            )
        if self.out and any(path.is_file() for path in (Path(self.out), *Path(self.out).parents)):
            raise UserError(
                f"--out {self.out} is a file or in one, but results lie in a folder. Name another."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalyseConfig:
    """Options of `dotmoe analyse`."""

    run: Annotated[str, ARGUMENT, PLACE]
    """Folder of a finished `dotmoe convert` or `dotmoe finetune`."""
    tokens: Annotated[int, at_least(1)] = 32768
    """Maximum number of held-out tokens to route, in whole blocks; at least one block is routed."""
    load: LoadConfig = field(default_factory=LoadConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """Two models, and what to measure with them."""

    needs: ClassVar[tuple[Need, ...]] = (
        Need(
            ("context_tokens", "decode_steps"),
            "--batch-sizes",
            lambda asked: asked.batch_sizes or not asked.prompt_tokens,  # another error says so
        ),
        Need(
            ("dtype", "device", "sharding"),
            "checkpoints",
            lambda asked: not (_has_gguf(asked.dense) and _has_gguf(asked.moe)),
            "{option} is {value}, but llama.cpp runs GGUF files on the CPU as they are. Name "
            "checkpoints",
        ),
    )

    dense: Annotated[str, ARGUMENT]
    """Dense model: checkpoint folder, hub name or .gguf file."""
    moe: Annotated[str, ARGUMENT]
    """MoE made from DENSE: checkpoint, run folder (its export is used) or .gguf file. Transformers
    runs both models, or llama.cpp on the CPU if both are .gguf files."""
    batch_sizes: tuple[Annotated[int, at_least(1)], ...] = (1, 4, 16)
    """Numbers of sequences that are decoded at once, each at least 1; none skips decode."""
    prompt_tokens: Annotated[int, at_least(0)] = 512
    """Length of the prompt in prefill, in tokens; 0 skips prefill."""
    context_tokens: tuple[Annotated[int, at_least(1)], ...] = (128,)
    """Numbers of tokens in each sequence's cache when a round of decode starts."""
    decode_steps: Annotated[int, at_least(1)] = 8
    """Number of tokens that each sequence decodes in a round."""
    rounds: Annotated[int, at_least(1)] = 10
    """Number of rounds of each model at each measured point."""
    threads: Annotated[int | None, at_least(1)] = None
    """Number of CPU threads of each model, at least 1. Default: as many as torch uses."""
    clock: Literal["wall", "cpu"] = "wall"
    """Clock that measures times. wall: elapsed time. cpu: computing time of one thread, excluding
    time that other processes used; for a busy machine, with --threads 1 and no GPU."""
    load: LoadConfig = field(default_factory=LoadConfig)
    seed: Annotated[int, at_least(0)] = 0
    """Seed of the input tokens."""
    out: Annotated[str | None, Shown("FILE"), PLACE] = None
    """File to write the result to, as JSON; of a run, 6_evaluate/bench.json is in its report."""
    json: bool = False
    """Print JSON instead of tables."""

    def check_together(self) -> None:
        """Refuse a benchmark with nothing to measure or to compare."""
        if self.dense == self.moe:
            raise UserError(
                f"DENSE and MOE are both {self.dense}. Name the MoE that was made from it: its run "
                "folder or its export."
            )
        if not self.batch_sizes and not self.prompt_tokens:
            raise UserError(
                "batch_sizes is empty and prompt_tokens is 0, which leaves nothing to measure. "
                "Set one of them."
            )

    @property
    def points(self) -> list[Values]:
        """The measured points in order: `name`, `batch`, `tokens`, and `steps` (0 in prefill)."""
        prefill = {"name": "prefill", "batch": 1, "tokens": self.prompt_tokens, "steps": 0}
        decode = {"name": "decode", "steps": self.decode_steps}
        points = [
            decode | {"tokens": tokens, "batch": batch}
            for tokens in self.context_tokens
            for batch in self.batch_sizes
        ]
        return [prefill, *points] if self.prompt_tokens else points


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectConfig(RunConfig):
    """A conversion to plan, with the options of `dotmoe convert`, and the machines to plan for."""

    command: ClassVar[str] = "inspect"
    needs: ClassVar[tuple[Need, ...]] = needs_of.INSPECT

    out: Annotated[str, ARGUMENT, HOW, PLACE] = ""
    """What `dotmoe convert` would write; not used."""
    train: Train | None = None
    """What a finetuning of the result trains: all weights, those of the experts, or low-rank
    adapters on experts and attention. Default: as its recipe does."""
    finetune_recipe: Literal[None, "default", "paper", "sft", "small"] = None
    """Recipe of a finetuning of the result (steps, batches, teacher), to plan it for all machines.
    Default: `default`, of which only the time is shown."""
    finetune_steps: Annotated[int, at_least(1)] | None = None
    """Number of optimizer steps of that finetuning, if not its recipe's."""
    gpu: Literal[None, "a100", "h100", "h200", "b200", "l40s"] = None
    """GPU type to plan for. Default: this machine, and every known type."""
    gpus: Annotated[int, at_least(1)] | None = None
    """Number of GPUs, on one node. Default: 1 and 8."""
    json: bool = False
    """Print JSON instead of tables, with the items that each size is the sum of, and all ways to
    run that were compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportConfig:
    """One page on what a conversion lost and gained."""

    run: Annotated[str, ARGUMENT, PLACE]
    """Folder of a finished `dotmoe convert` or `dotmoe finetune`; the page is in `7_report`."""
