"""What to measure, which model is meant, as stock Transformers loads it, and what scores tokens."""

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
from transformers import AutoTokenizer
from tyro.conf import Positional

from dotmoe.checkpoint import checkpoint_folder, require_checkpoint
from dotmoe.distributed import resolved_device
from dotmoe.errors import UserError, one_line
from dotmoe.export.record import RECORD_FILE, require_checksums
from dotmoe.files import Values
from dotmoe.load import LoadConfig, load_weights, resolved_dtype
from dotmoe.models.family import stated
from dotmoe.options import at_least
from dotmoe.progress import Progress, Update
from dotmoe.run_folder import export_folder

TokenNats = Callable[[Tensor], Tensor]
"""Token ids [B, T] -> cross-entropy of every token but the first of each row, in nats: float64 on
the CPU, [B, T - 1]. Rows do not see each other. Perplexity needs no more of a model than this."""
CHUNK_LOGITS = 1 << 25
"""Logits formed at once, in one model: 128 MiB in float32."""


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
        return in_context("window", self.window or min(2048, context), context)

    @property
    def windows_at_once(self) -> int:
        """Windows a forward pass."""
        return 8 if self.batch_size == "auto" else self.batch_size


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
    tasks: tuple[str, ...] = ()
    """Run these benchmark tasks by lm-evaluation-harness: `paper` (its six), or tasks and groups by
    the harness's names (mmlu, gsm8k). What is finished is not run again."""
    task_data: str | None = None
    """Folder with the data of the tasks. Default: the hub."""
    shots: Annotated[int | None, at_least(0)] = None
    """Solved examples before each question, for all tasks. Default: the paper's, else the
    harness's."""
    limit: Annotated[int | None, at_least(1)] = None
    """Score only the first so many questions of each task, 1 or more; for trying out."""
    max_length: Annotated[int | None, at_least(2)] = None
    """Tokens that the model may see at once in tasks, 2 to its context. Default: its context. Of
    `wikitext` it is the window of the rolling log-likelihood."""
    word_perplexity: Annotated[tuple[int, ...] | None, at_least(1)] = None
    """Measure perplexity a word of --text, by rolling log-likelihood in windows of so many tokens;
    without numbers in the paper's of 2048, 4096, 8192 and 32768 that the context allows."""
    fidelity: bool = False
    """Compare hidden states, logits and FFN outputs with the dense model's on --text."""
    generate: Annotated[int | None, at_least(1)] = None
    """Continue prompts by up to this many tokens, the most likely one each time, side by side with
    --against."""
    prompts: tuple[str, ...] = ()
    """Prompts to continue. Default: beginnings cut from --text at equal distances."""
    num_prompts: Annotated[int, at_least(1)] = 16
    """Prompts cut from the text."""
    curve: Annotated[tuple[int, ...] | None, at_least(1)] = None
    """Measure an export at these k, and at k = E; without numbers at a ladder of them."""
    tokenizer: str | None = None
    """Model whose tokenizer cuts the text, for a GGUF to run in llama.cpp. Default: the one that
    an exported GGUF was made from; any other GGUF is read by Transformers."""
    corpus: TextConfig = field(default_factory=TextConfig)
    load: LoadConfig = field(default_factory=LoadConfig)

    @property
    def names(self) -> dict[str, str]:
        """Models to measure as the user named them, as `model` and `against`."""
        return {"model": self.model} | ({"against": self.against} if self.against else {})

    @property
    def measurement(self) -> str:
        """Name of the one measurement that is asked for, a key of `MEASUREMENTS`."""
        options = {
            "tasks": self.tasks or None,
            "word_perplexity": self.word_perplexity,
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
        """Refuse two measurements at once, one without text, and results that cannot be kept."""
        has_prompts = self.measurement == "generation" and self.prompts
        if not (self.corpus.text or self.tasks or has_prompts):
            raise UserError(
                "--text names no file. Give a text to measure on, or to --generate --prompts."
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
    """So many tokens; `UserError` beyond the context of the model."""
    if tokens > context:
        raise UserError(
            f"{name} is {tokens}, but must lie in {least} to {context}, the model's context. "
            f"{remedy}"
        )
    return tokens


class StockModel(NamedTuple):
    """A loaded checkpoint."""

    model: Any
    tokenizer: Any
    dtype: str
    """Number format of its weights in memory."""
    context: int
    """Tokens that it can see at once."""


def loaded(folder: Path, load: LoadConfig) -> StockModel:
    """A checkpoint and its tokenizer; a `UserError` for one that Transformers cannot load."""
    device = resolved_device(load.device)
    with loading(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model: Any = load_weights(folder, resolved_dtype(load.dtype, device)).to(device)
    dtype = str(model.dtype).removeprefix("torch.")
    return StockModel(model, tokenizer, dtype, int(model.config.max_position_embeddings))


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Inside, what Transformers finds wrong with a checkpoint becomes a `UserError`."""
    try:
        yield
    except Exception as error:  # its errors are of many types
        if isinstance(error, UserError | MemoryError) or "memory" in str(error):
            raise  # the command line tells what to do where memory ran out
        raise UserError(
            f"{folder} cannot be loaded by Transformers ({type(error).__name__}: "
            f"{one_line(error)}). Compare it with the original checkpoint."
        ) from error


def model_folder(name: str) -> Path:
    """Folder of a checkpoint that stock Transformers can load.

    Raises a `UserError`: there is none, it is a damaged export, or a GGUF that dotmoe exported.
    """
    file = gguf_file(Path(name))
    if file and (file.parent / RECORD_FILE).is_file():
        raise UserError(
            f"{name} is a GGUF, of which only the perplexity is measured. Name the Transformers "
            "export of the same run."
        )
    folder = export_folder(checkpoint_folder(str(file or name)))
    require_checkpoint(folder)
    require_checksums(folder)
    return folder


def gguf_file(path: Path) -> Path | None:
    """The GGUF meant by a path: the file itself, or the only one in a folder; None: none."""
    path = Path(os.path.expanduser(path))
    is_gguf = path.is_file() and path.suffix == ".gguf"
    files = [path] if is_gguf else list(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def by_side(
    config: EvaluateConfig,
    progress: Progress,
    measure: Callable[[StockModel, Update], Values],
    measure_gguf: Callable[[Path, Update], Values] | None = None,
) -> Values:
    """What is measured of each model, as `model` and `against`, with its name and dtype.

    With `measure_gguf` a GGUF runs in llama.cpp if dotmoe exported it or a tokenizer is named; any
    other is a dense model for Transformers. Both models are found before the first is measured.
    """
    paths = {}
    for label, name in config.names.items():
        file = gguf_file(Path(name))
        has_tokenizer = file and (config.tokenizer or (file.parent / RECORD_FILE).is_file())
        paths[label] = file if measure_gguf and file and has_tokenizer else model_folder(name)

    def measured(path: Path) -> Values:  # after which the model is gone from memory
        if measure_gguf and path.is_file():
            return {"dtype": "gguf", **measure_gguf(path, update)}
        stock = loaded(path, config.load)
        return {"dtype": stock.dtype, **measure(stock, update)}

    with progress.bar("evaluate", tokens=1) as update:
        return {label: {"name": config.names[label], **measured(paths[label])} for label in paths}


def sides_of(result: Values) -> list[Values]:
    """What was measured of each model; the other model first, as in the paper's tables."""
    return [result[label] for label in ("against", "model") if label in result] or [result]


def stock_nats(model: Any) -> TokenNats:
    """Scores by a causal language model of Transformers in evaluation mode, in float32.

    Rows may have one token more than the context, since the last one is only predicted.
    """

    @torch.no_grad()
    def nats(tokens_BT: Tensor) -> Tensor:
        return nats_of(model, hidden_states(model, tokens_BT[:, :-1]), tokens_BT[:, 1:])

    return nats


def nats_of(model: Any, hidden_BTD: Tensor, labels_BT: Tensor) -> Tensor:
    """Cross-entropy of tokens given what the LM head reads, float64 on the CPU, [B, T]."""
    labels_T = labels_BT.flatten().long().to(hidden_BTD.device)
    parts = [
        cross_entropy(logits_TV, labels_T[part], reduction="none")
        for part, logits_TV in logits_in_parts(model, hidden_BTD.flatten(0, 1))
    ]
    return torch.cat(parts).double().cpu().view(labels_BT.shape)


def row_nats(logits_of: Callable[[Tensor], Tensor]) -> TokenNats:
    """Scores by a runtime that gives all logits [T, V] of one text [T], such as llama.cpp."""

    def nats(row: Tensor) -> Tensor:
        return cross_entropy(logits_of(row[:-1]).double(), row[1:].long(), reduction="none")

    return lambda tokens_BT: torch.stack([nats(row) for row in tokens_BT])


def hidden_states(model: Any, tokens_BT: Tensor) -> Tensor:
    """What the LM head reads, [B, T, D]: hidden states after the last norm."""
    device = next(model.parameters()).device
    output = model.base_model(input_ids=tokens_BT.long().to(device), use_cache=False)
    hidden_BTD: Tensor = output.last_hidden_state
    return hidden_BTD


def logits_in_parts(model: Any, hidden_TD: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Parts of a text and their logits in float32, no more than may exist at once.

    With what Granite, Cohere and Gemma do to logits.
    """
    config, head = model.base_model.config, model.get_output_embeddings()
    scale, divisor = stated(config, "logit_scale", 1), stated(config, "logits_scaling", 1)
    cap = stated(config, "final_logit_softcapping")
    rows = max(1, CHUNK_LOGITS // int(config.vocab_size))
    for start in range(0, len(hidden_TD), rows):
        part = slice(start, start + rows)
        logits_TV = head(hidden_TD[part]).float() * scale / divisor
        yield part, logits_TV if cap is None else torch.tanh(logits_TV / cap) * cap
