"""Which model a user means, loaded as stock Transformers loads it, and what scores tokens."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from dotmoe.checkpoint import checkpoint_folder, require_checkpoint
from dotmoe.distributed import resolved_device
from dotmoe.errors import UserError
from dotmoe.evaluate.config import EvaluateConfig
from dotmoe.export import require_checksums
from dotmoe.export.record import RECORD_FILE
from dotmoe.load import LoadConfig, load_weights, resolved_dtype
from dotmoe.progress import Progress, Update
from dotmoe.run_folder import export_folder

TokenNats = Callable[[Tensor], Tensor]
"""Token ids [B, T] -> cross-entropy of every token but the first of each row, in nats: float64 on
the CPU, [B, T - 1]. Rows do not see each other. Perplexity needs no more of a model than this."""

CHUNK_LOGITS = 1 << 25
"""Logits formed at once, in one model: 128 MiB in float32."""


class StockModel(NamedTuple):
    """A loaded checkpoint."""

    model: Any
    tokenizer: Any
    dtype: str
    """Number format of its weights in memory."""
    context: int
    """Tokens that it can see at once."""


def loaded(folder: Path, load: LoadConfig) -> StockModel:
    """A checkpoint and its tokenizer."""
    device = resolved_device(load.device)
    model: Any = load_weights(folder, resolved_dtype(load.dtype, device)).to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    dtype = str(model.dtype).removeprefix("torch.")
    return StockModel(model, tokenizer, dtype, int(model.config.max_position_embeddings))


def model_folder(name: str) -> Path:
    """Folder of a checkpoint that stock Transformers can load.

    Raises:
        UserError: There is none under that name, it is a damaged export, or a GGUF that dotmoe
            exported.
    """
    file = gguf_file(Path(name))
    if file is not None and _is_export(file):
        raise UserError(
            f"{name} is a GGUF, of which only the perplexity is measured. Name the Transformers "
            "export of the same run."
        )
    local = export_folder(Path(name))
    is_folder = file is None and local.is_dir()
    folder = local if is_folder else checkpoint_folder(str(file or name))
    require_checkpoint(folder)
    require_checksums(folder)
    return folder


def gguf_file(path: Path) -> Path | None:
    """The GGUF meant by a path: the file itself, or the only one in a folder; None: none."""
    if path.is_file() and path.suffix == ".gguf":
        return path
    found = sorted(path.glob("*.gguf")) if path.is_dir() else []
    return found[0] if len(found) == 1 else None


def _is_export(gguf: Path) -> bool:
    return (gguf.parent / RECORD_FILE).is_file()


def by_side(
    config: EvaluateConfig,
    progress: Progress,
    measure: Callable[[StockModel, Update], dict[str, Any]],
    measure_gguf: Callable[[Path, EvaluateConfig, Update], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """What is measured of each model, as `model` and `against`, with its name and dtype.

    A GGUF runs in llama.cpp if dotmoe exported it or a tokenizer is named; any other is a dense
    model for Transformers.
    """
    sides = {}
    with progress.bar("evaluate", tokens=1) as update:
        for label, name in config.names.items():
            file = gguf_file(Path(name))
            if file and measure_gguf and (config.tokenizer or _is_export(file)):
                found = {"dtype": "gguf", **measure_gguf(file, config, update)}
            else:
                stock = loaded(model_folder(name), config.load)
                found = {"dtype": stock.dtype, **measure(stock, update)}
            sides[label] = {"name": name, **found}
    return sides


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
    hidden_TD, labels_T = hidden_BTD.flatten(0, 1), labels_BT.flatten().long()
    labels_T = labels_T.to(hidden_TD.device)
    parts = [
        cross_entropy(logits(model, hidden_TD[part]), labels_T[part], reduction="none")
        for part in chunks(model, len(labels_T))
    ]
    return torch.cat(parts).double().cpu().view(labels_BT.shape)


def row_nats(logits_of: Callable[[Tensor], Tensor]) -> TokenNats:
    """Scores by a runtime that gives all logits [T, V] of one text [T], such as llama.cpp."""
    return lambda tokens_BT: torch.stack(
        [
            cross_entropy(logits_of(row[:-1]).double(), row[1:].long(), reduction="none")
            for row in tokens_BT
        ]
    )


def hidden_states(model: Any, tokens_BT: Tensor) -> Tensor:
    """What the LM head reads, [B, T, D]: hidden states after the last norm."""
    device = next(model.parameters()).device
    output = model.base_model(input_ids=tokens_BT.long().to(device), use_cache=False)
    hidden_BTD: Tensor = output.last_hidden_state
    return hidden_BTD


def logits(model: Any, hidden_TD: Tensor) -> Tensor:
    """Logits of some hidden states in float32, with what Granite, Cohere and Gemma do to them."""
    config = model.config
    logits_TV: Tensor = model.get_output_embeddings()(hidden_TD).float()
    logits_TV = logits_TV * getattr(config, "logit_scale", 1) / getattr(config, "logits_scaling", 1)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits_TV if cap is None else torch.tanh(logits_TV / cap) * cap


def chunks(model: Any, num_tokens: int) -> Iterator[slice]:
    """Parts of a row of tokens whose logits may exist at once."""
    rows = max(1, CHUNK_LOGITS // int(model.config.vocab_size))
    return (slice(start, start + rows) for start in range(0, num_tokens, rows))
