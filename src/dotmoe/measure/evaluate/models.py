"""Models in the classes of stock Transformers, and scores of tokens."""

import os.path
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dotmoe.common.device import resolved_device
from dotmoe.common.errors import UserError, one_line
from dotmoe.common.files import Values, expanded
from dotmoe.common.progress import Progress, Update
from dotmoe.export.record import RECORD_FILE, ExportRecord, require_checksums
from dotmoe.measure.config import EvaluateConfig
from dotmoe.models.checkpoint import dtype_name
from dotmoe.models.config import LoadConfig, is_gguf
from dotmoe.models.identity import FINGERPRINT, fingerprint
from dotmoe.models.load import load_weights, require_loadable, resolved_dtype
from dotmoe.models.read_config import config_of
from dotmoe.models.scoring import hidden_states, nats_of
from dotmoe.models.source import EMBEDDED, at_revision, checkpoint_folder, is_local
from dotmoe.models.tokenizer import load_tokenizer
from dotmoe.run.folder import RunFolder, export_folder

TokenNats = Callable[[Tensor], Tensor]
"""Token ids [B, T] -> cross-entropy of every token but the first of each row, in nats: float64 on
the CPU, [B, T - 1]. Rows are independent. Perplexity needs nothing else of a model."""


class StockModel(NamedTuple):
    """A checkpoint in its class of stock Transformers, with weights that `load_weights` read."""

    model: Any
    tokenizer: Any
    dtype: str
    """Dtype of the weights in memory."""
    context: int
    """Number of tokens that the model, and one beside it, can see at once."""


def loaded(folder: Path, load: LoadConfig) -> StockModel:
    """Load a checkpoint and its tokenizer; raises `UserError` if Transformers cannot."""
    device = resolved_device(load.device)
    with loading(folder):
        model: Any = load_weights(folder, resolved_dtype(load.dtype, device)).to(device)
        tokenizer = load_tokenizer(folder, model.config.vocab_size)
    dtype = dtype_name(model.dtype)
    return StockModel(model, tokenizer, dtype, int(model.config.max_position_embeddings))


def context_of(path: Path) -> int:
    """Number of tokens that a model can see at once: of a checkpoint folder, or of a GGUF file."""
    if is_gguf(path):
        from dotmoe.models.from_gguf import GgufFile  # an optional package

        return GgufFile(path).size("context_length")
    with loading(path):
        return int(config_of(path).max_position_embeddings)


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
    require_checksums(folder)
    require_loadable(folder)
    return folder


def dense_model_of(export: Path, option: str) -> str:
    """Name of the dense model that an exported folder was made from, as commands accept it.

    A record has no local path, so of a local model only the run's own folder knows it; elsewhere a
    `UserError` asks for `option`.
    """
    run = RunFolder(export.resolve().parent)
    if run.exists:
        return run.model_to_read
    record = ExportRecord.load(export)
    if record.revision or record.source == EMBEDDED or "/" in record.source:  # older: a path
        return at_revision(record.source, record.revision)
    raise UserError(
        f"{export} was made from the local model {record.source}, but does not record where that "
        f"is. Name it with {option}."
    )


def require_unchanged_dense(export: Path, against: Path) -> None:
    """Refuse to compare an export in its run with the run's dense model if that has changed since.

    A hub model does not change: a run names its commit.
    """
    run = RunFolder(export.resolve().parent)
    if not run.exists or not is_local(run.model):
        return
    dense = expanded(run.model)
    if dense.exists() and checkpoint_folder(run.model) == against.resolve():
        run.require_inputs({"model": fingerprint(against)})


def gguf_file(path: Path) -> Path | None:
    """The GGUF at a path: the file itself, or that of an exported folder; None if there is none."""
    path = Path(os.path.expanduser(path))
    if is_gguf(path) and path.is_file():
        return path
    files = [each for each in path.glob("*") if is_gguf(each)]
    is_export = (path / RECORD_FILE).is_file() and not (path / "config.json").exists()
    return files[0] if is_export and len(files) == 1 else None


def by_side(
    config: EvaluateConfig,
    progress: Progress,
    measure: Callable[[StockModel, Update], Values],
    measure_gguf: Callable[[Path, int, Update], Values] | None = None,
) -> Values:
    """Measure each model; results are under `model` and `against`, with name and fingerprint.

    With `measure_gguf` a GGUF runs in llama.cpp if dotmoe exported it or a tokenizer is named; any
    other is a dense model for Transformers. Both models are located before any is measured, and
    both are measured within the smaller of their contexts.
    """
    paths = {}
    for label, name in config.names.items():
        file = gguf_file(Path(name))
        has_tokenizer = file and (config.tokenizer or (file.parent / RECORD_FILE).is_file())
        paths[label] = file if measure_gguf and file and has_tokenizer else model_folder(name)

    if "against" in paths:
        require_unchanged_dense(paths["model"], paths["against"])
    context = min(map(context_of, paths.values()))

    def measured(path: Path, update: Update) -> Values:  # the model is freed on return
        if measure_gguf and path.is_file():
            return {"dtype": "gguf", **measure_gguf(path, context, update)}
        stock = loaded(path, config.load)._replace(context=context)
        return {"dtype": stock.dtype, **measure(stock, update)}

    with progress.bar("evaluate", tokens=0 if config.generate else 1) as update:  # 0: prompts
        return {
            label: {
                "name": config.names[label],
                FINGERPRINT: fingerprint(path),
                **measured(path, update),
            }
            for label, path in paths.items()
        }


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
