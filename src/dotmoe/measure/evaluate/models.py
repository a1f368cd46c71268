"""Options of an evaluation, models as stock Transformers loads them, and scores of tokens."""

import os.path
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import tyro
from torch import Tensor
from torch.nn.functional import cross_entropy
from tyro.conf import Positional

from dotmoe.common.distributed import resolved_device
from dotmoe.common.errors import UserError, one_line
from dotmoe.common.files import Values
from dotmoe.common.options import at_least
from dotmoe.common.progress import Progress, Update
from dotmoe.export.record import RECORD_FILE, ExportRecord, require_checksums
from dotmoe.models.checkpoint import EMBEDDED, at_revision, checkpoint_folder, require_checkpoint
from dotmoe.models.load import LoadConfig, load_weights, resolved_dtype
from dotmoe.models.scoring import hidden_states, nats_of
from dotmoe.models.tokenizer import load_tokenizer
from dotmoe.run.folder import RunFolder, export_folder

TokenNats = Callable[[Tensor], Tensor]
"""Token ids [B, T] -> cross-entropy of every token but the first of each row, in nats: float64 on
the CPU, [B, T - 1]. Rows are independent. Perplexity needs nothing else of a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """Text to measure on, and how it is cut into windows."""

    text: tuple[str, ...] = ()
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
    CPU, fewer if the vocabulary is large; on a GPU as many requests as fit."""

    def window_in(self, context: int) -> int:
        """Tokens per window for a model with this context; raises `UserError` if it is longer."""
        return in_context("window", self.window or min(2048, context), context)

    @property
    def windows_at_once(self) -> int:
        """Number of windows per forward pass."""
        return 8 if self.batch_size == "auto" else self.batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """What to measure: perplexity of --text, unless --tasks, --fidelity, --generate
    or --curve selects something else.
    """

    model: Annotated[Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Dense model (folder, hub name or GGUF file), exported checkpoint, run folder, or, for
    perplexity only, an exported GGUF (the file or its folder)."""
    against: str | None = None
    """Second model to measure, side by side with MODEL. For --fidelity: the dense model, by default
    the one that MODEL was made from (of a local one, only a run folder knows the path)."""
    out: str | None = None
    """Folder to write results to. Default for tasks: `6_evaluate` of a run, else
    `evaluation-MODEL`; other results are only printed."""
    json: bool = False
    """Print JSON instead of tables."""
    tasks: tuple[str, ...] = ()
    """Benchmark tasks to run with lm-evaluation-harness: `paper` (the paper's six), `paper_by_k`
    (the five of its table over k), or tasks and groups by the harness's names (mmlu, gsm8k).
    Finished tasks are not run again."""
    task_data: str | None = None
    """Folder with the data of the tasks. Default: download them from the hub."""
    shots: Annotated[int | None, at_least(0)] = None
    """Number of solved examples before each question, for all tasks. Default: the paper's number,
    else the harness's."""
    limit: Annotated[int | None, at_least(1)] = None
    """Score only this many questions of each task, the first ones, 1 or more; for a trial."""
    chat_template: bool = False
    """Give questions of tasks, or `prompts`, through the model's chat template, as chat models
    expect."""
    max_length: Annotated[int | None, at_least(2)] = None
    """Tokens that the model may see at once in tasks, 2 to its context. Default: its context. In
    `wikitext` this is the window of the rolling log-likelihood."""
    fidelity: bool = False
    """Compare hidden states, logits and FFN outputs with the dense model's on --text."""
    generate: Annotated[int | None, at_least(1)] = None
    """Continue prompts by up to this many tokens, side by side with the model of --against."""
    temperature: Annotated[float, at_least(0)] = 0.0
    """Temperature of --generate; 0: the most likely token at every step. Seed of samples: 0."""
    prompts: tuple[str, ...] = ()
    """Prompts to continue. Default: pieces cut from --text at equal distances."""
    num_prompts: Annotated[int, at_least(1)] = 16
    """Number of prompts that are cut from --text."""
    curve: Annotated[tuple[int, ...] | None, at_least(1)] = None
    """Measure perplexity of an export at these k, and at k = E. Without numbers: eighths of E."""
    tokenizer: str | None = None
    """Model whose tokenizer is used for a GGUF that runs in llama.cpp. Default: the hub model that
    an exported GGUF was made from; without this option Transformers reads any other GGUF."""
    corpus: TextConfig = field(default_factory=TextConfig)
    load: LoadConfig = field(default_factory=LoadConfig)

    @property
    def names(self) -> dict[str, str]:
        """Names of the models to measure as the user gave them, as `model` and `against`."""
        return {"model": self.model} | ({"against": self.against} if self.against else {})

    @property
    def measurement(self) -> str:
        """Name of the one selected measurement, a key of `MEASUREMENTS`."""
        options = {
            "tasks": self.tasks or None,
            "fidelity": self.fidelity or None,
            "generation": self.generate,
            "curve": self.curve,
        }
        chosen = [name for name, option in options.items() if option is not None]
        if len(chosen) > 1:
            named = " and ".join(f"--{name}" for name in chosen).replace("_", "-")
            raise UserError(
                f"{named.replace('generation', 'generate')} are two measurements. "
                "Ask for one of them at a time."
            )
        return chosen[0] if chosen else "perplexity"

    def check_together(self) -> None:
        """Refuse two measurements, options of tasks without any, no text, and a file as `out`."""
        of_tasks = ("task_data", "shots", "limit", "max_length")
        for name in () if self.tasks else of_tasks:
            if (value := getattr(self, name)) is not None and value is not False:
                raise UserError(f"{name} is {value}, but it is for --tasks alone. Leave it out.")
        if self.chat_template and not (self.tasks or (self.generate and self.prompts)):
            raise UserError(
                "chat_template is for --tasks, or --generate with --prompts. Leave it out."
            )
        if self.temperature and not self.generate:
            raise UserError("temperature is for --generate alone. Leave it out.")
        if not (self.corpus.text or self.tasks or (self.generate and self.prompts)):
            raise UserError(
                "--text names no file. Give a text to measure on, or --prompts for --generate."
            )
        if self.measurement == "curve" and self.against:
            raise UserError(
                f"--curve measures MODEL alone, but --against names {self.against}. Leave it out."
            )
        if self.out and any(path.is_file() for path in (Path(self.out), *Path(self.out).parents)):
            raise UserError(
                f"--out {self.out} is a file or in one, but results lie in a folder. Name another."
            )


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


class StockModel(NamedTuple):
    """A checkpoint as stock Transformers loads it."""

    model: Any
    tokenizer: Any
    dtype: str
    """Dtype of the weights in memory."""
    context: int
    """Number of tokens that the model can see at once."""


def loaded(folder: Path, load: LoadConfig) -> StockModel:
    """Load a checkpoint and its tokenizer; raises `UserError` if Transformers cannot."""
    device = resolved_device(load.device)
    with loading(folder):
        model: Any = load_weights(folder, resolved_dtype(load.dtype, device)).to(device)
        tokenizer = load_tokenizer(folder, model.config.vocab_size)
    dtype = str(model.dtype).removeprefix("torch.")
    return StockModel(model, tokenizer, dtype, int(model.config.max_position_embeddings))


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Within this context, errors of Transformers about a checkpoint become a `UserError`."""
    try:
        yield
    except Exception as error:  # its errors are of many types
        if isinstance(error, UserError | MemoryError) or "memory" in str(error):
            raise  # the command line gives the remedy if memory runs out
        raise UserError(
            f"{folder} cannot be loaded by Transformers ({type(error).__name__}: "
            f"{one_line(error)}). Compare it with the original checkpoint."
        ) from error


def model_folder(name: str) -> Path:
    """Folder of a checkpoint that stock Transformers can load.

    Raises `UserError` if there is none, or it is a damaged export or a GGUF of dotmoe.
    """
    file = gguf_file(Path(name))
    if file and (file.parent / RECORD_FILE).is_file():
        raise UserError(
            f"{name} is an exported GGUF: only its perplexity can be measured. Name the "
            "Transformers export of the same run."
        )
    folder = export_folder(checkpoint_folder(str(file or name)))
    require_checkpoint(folder)
    require_checksums(folder)
    return folder


def dense_model_of(export: Path, option: str) -> str:
    """Name of the dense model that an exported folder was made from, as commands accept it.

    A record has no local path, so of a local model only the run's own folder knows it; elsewhere a
    `UserError` asks for `option`.
    """
    run = RunFolder(export.resolve().parent)
    if run.exists:
        return run.model
    record = ExportRecord.load(export)
    if record.revision or record.source == EMBEDDED or "/" in record.source:  # older: a path
        return at_revision(record.source, record.revision)
    raise UserError(
        f"{export} was made from the local model {record.source}, but does not record where that "
        f"is. Name it with {option}."
    )


def gguf_file(path: Path) -> Path | None:
    """The GGUF at a path: the file itself, or the only one in the folder; None if there is none."""
    path = Path(os.path.expanduser(path))
    files = [path] if path.suffix == ".gguf" and path.is_file() else list(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def by_side(
    config: EvaluateConfig,
    progress: Progress,
    measure: Callable[[StockModel, Update], Values],
    measure_gguf: Callable[[Path, Update], Values] | None = None,
) -> Values:
    """Measure each model; results are under `model` and `against`, with its name and dtype.

    With `measure_gguf` a GGUF runs in llama.cpp if dotmoe exported it or a tokenizer is named; any
    other is a dense model for Transformers. Both models are located before any is measured.
    """
    paths = {}
    for label, name in config.names.items():
        file = gguf_file(Path(name))
        has_tokenizer = file and (config.tokenizer or (file.parent / RECORD_FILE).is_file())
        paths[label] = file if measure_gguf and file and has_tokenizer else model_folder(name)

    def measured(path: Path) -> Values:  # the model is freed on return
        if measure_gguf and path.is_file():
            return {"dtype": "gguf", **measure_gguf(path, update)}
        stock = loaded(path, config.load)
        return {"dtype": stock.dtype, **measure(stock, update)}

    with progress.bar("evaluate", tokens=0 if config.generate else 1) as update:  # 0: prompts
        return {label: {"name": config.names[label], **measured(paths[label])} for label in paths}


def sides_of(result: Values) -> list[Values]:
    """Results of each model; that of `against` comes first, as in the paper's tables."""
    return [result[label] for label in ("against", "model") if label in result] or [result]


def stock_nats(model: Any) -> TokenNats:
    """Score tokens with a causal language model of Transformers in evaluation mode, in float32.

    Rows may have one token more than the context, because the last one is only predicted.
    """

    @torch.no_grad()
    def nats(tokens_BT: Tensor) -> Tensor:
        return nats_of(model, hidden_states(model, tokens_BT[:, :-1]), tokens_BT[:, 1:])

    return nats


def row_nats(logits_of: Callable[[Tensor], Tensor]) -> TokenNats:
    """Score tokens by a runtime that gives all logits [T, V] of one text [T], such as llama.cpp."""

    def nats(row: Tensor) -> Tensor:
        return cross_entropy(logits_of(row[:-1]).double(), row[1:].long(), reduction="none")

    return lambda tokens_BT: torch.stack([nats(row) for row in tokens_BT])
