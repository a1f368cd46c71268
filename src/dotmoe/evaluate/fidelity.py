"""How close a model stays to its dense model: hidden states, logits, and FFN by FFN."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dotmoe.errors import UserError
from dotmoe.evaluate.config import EvaluateConfig
from dotmoe.evaluate.models import StockModel, loaded, model_folder, named_folders
from dotmoe.evaluate.perplexity import packed_text
from dotmoe.evaluate.scoring import chunks, hidden_states, logits
from dotmoe.export import ExportRecord, format_named
from dotmoe.export.record import RECORD_FILE
from dotmoe.models.family import family_of
from dotmoe.progress import Progress, Update, no_update

FFNs = Mapping[int, tuple[nn.Module, Callable[[Tensor], Tensor]]]
"""For each split layer the dense model's FFN, and what maps its input [B, T, D] to the output of
the other model's FFN."""


@dataclass(slots=True)
class Closeness:
    """Running sums over pairs of vectors, the second being the dense model's; float64."""

    cosine: float = 0.0
    squares: float = 0.0
    size: float = 0.0
    tokens: int = 0
    entries: int = 0

    def add(self, actual_TD: Tensor, dense_TD: Tensor) -> None:
        """Take in some tokens."""
        actual_TD, dense_TD = actual_TD.float(), dense_TD.float()
        self.cosine += float(F.cosine_similarity(actual_TD, dense_TD, dim=1).double().sum())
        self.squares += float((actual_TD - dense_TD).square().sum(dim=1).double().sum())
        self.size += float(dense_TD.square().sum(dim=1).double().sum())
        self.tokens += len(dense_TD)
        self.entries += dense_TD.numel()

    def values(self) -> dict[str, float]:
        """`cosine`: similarity of a token's two vectors, mean over tokens. `mse`: squared
        difference, mean over tokens and entries. `relative_mse`: the same over the mean square of
        the dense model's entries.
        """
        return {
            "cosine": self.cosine / self.tokens,
            "mse": self.squares / self.entries,
            "relative_mse": self.squares / self.size,
        }


@torch.no_grad()
def fidelity(
    dense: Any,
    model: Any,
    tokens: Tensor,
    window: int,
    ffns: FFNs,
    batch_size: int = 8,
    on_progress: Update = no_update,
) -> dict[str, Any]:
    """Compare a model with its dense model, both run on the same windows of tokens.

    tab:output_aware_similarity is `before_head` and `after_head`, tab:motivation_mse_combined the
    `mse` of one layer's `ffn`.

    Args:
        dense: The dense model, a causal language model of Transformers.
        model: The other, with the same vocabulary and width.
        tokens: Token ids, one dimension; those that do not fill a window are left out, unless all
            are fewer than one window.
        window: Tokens of a window, 1 to the context; windows do not see each other.
        ffns: Pairs of FFNs to compare; empty: none.
        batch_size: Windows at once.
        on_progress: Told windows done and windows in all.

    Returns:
        `before_head` (hidden states after the last norm, "pre-LM") and `after_head` (logits,
        "post-LM"), see `Closeness.values`; `kl`: KL(dense || model) of the predictions, nats a
        token; `top1_agreement`: share of tokens with the same most likely next token; `ffn`: of
        each split FFN's output, both fed the dense model's input; `mean_ffn_mse`; `tokens`.

    Raises:
        UserError: Another vocabulary or width.
    """
    for key in ("vocab_size", "hidden_size"):
        ours, theirs = getattr(model.config, key), getattr(dense.config, key)
        if ours != theirs:
            raise UserError(
                f"{key} is {ours} in the model and {theirs} in the one to compare it with, so one "
                "was not made from the other. Name the dense model with --against."
            )
    window = min(window, tokens.numel())
    rows = tokens[: tokens.numel() // window * window].view(-1, window)
    before, after, by_layer = Closeness(), Closeness(), {layer: Closeness() for layer in ffns}
    kl, same, done = 0.0, 0, 0
    for batch in torch.split(rows, batch_size):
        hooks = [
            ffn.register_forward_hook(_comparing(other, by_layer[layer]))
            for layer, (ffn, other) in ffns.items()
        ]
        dense_TD = hidden_states(dense, batch).flatten(0, 1)
        for hook in hooks:
            hook.remove()
        actual_TD = hidden_states(model, batch).flatten(0, 1).to(dense_TD.device)
        before.add(actual_TD, dense_TD)
        for part in chunks(len(dense_TD), int(dense.config.vocab_size)):
            dense_TV, actual_TV = logits(dense, dense_TD[part]), logits(model, actual_TD[part])
            after.add(actual_TV, dense_TV)
            same += int((actual_TV.argmax(dim=1) == dense_TV.argmax(dim=1)).sum())
            dense_log, actual_log = dense_TV.log_softmax(dim=1), actual_TV.log_softmax(dim=1)
            kl_TV = F.kl_div(actual_log, dense_log, log_target=True, reduction="none")
            kl += float(kl_TV.sum(dim=1).double().sum())
        done += len(batch)
        on_progress(done, len(rows))
    layers = [{"layer": layer, **sums.values()} for layer, sums in by_layer.items()]
    return {
        "before_head": before.values(),
        "after_head": after.values(),
        "kl": kl / before.tokens,
        "top1_agreement": same / before.tokens,
        "ffn": layers,
        "mean_ffn_mse": sum(each["mse"] for each in layers) / len(layers) if layers else None,
        "tokens": before.tokens,
    }


def _comparing(other: Callable[[Tensor], Tensor], sums: Closeness) -> Any:
    """A hook that feeds the other model's FFN what a dense FFN is fed."""

    def hook(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        sums.add(other(arguments[0]).flatten(0, 1), output.flatten(0, 1))

    return hook


def measure_fidelity(config: EvaluateConfig, progress: Progress) -> dict[str, Any]:
    """Compare a model with its dense model on `config.corpus.text`."""
    config.corpus.require_text()
    folders = named_folders(config)
    has_record = (folders["model"] / RECORD_FILE).is_file()
    record = ExportRecord.load(folders["model"]) if has_record else None
    against = config.against or (record.source if record else None)
    if against is None:
        raise UserError(
            f"{config.model} is no export of dotmoe, which would name its dense model. Name that "
            "with --against."
        )
    dense = loaded(model_folder(against), config.load)
    other = loaded(folders["model"], config.load)
    window = config.corpus.window_in(min(dense.context, other.context))
    text = packed_text(config.corpus, dense.tokenizer)
    ffns, reason = _ffns(dense, other, record)
    with progress.bar("evaluate") as update:
        rows = config.corpus.windows_at_once
        found = fidelity(dense.model, other.model, text.tokens, window, ffns, rows, update)
    return {
        "against": against,
        "dtype": {"model": other.dtype, "against": dense.dtype},
        **found,
        "active_experts": record.active_experts if record else None,
        "num_experts": record.num_experts if record else None,
        "ffn_left_out": reason,
        "text": list(text.names),
        "window": window,
    }


def _ffns(
    dense: StockModel, other: StockModel, record: ExportRecord | None
) -> tuple[FFNs, str | None]:
    """Pairs of FFNs by layer, or why there are none."""
    if record is None:
        return {}, "the model is no export of dotmoe, so that its FFNs are not known"
    output = format_named(record.format)
    if record.shared_size and not output.block_has_shared:
        return {}, f"{record.format} keeps its shared expert outside of the MoE block"
    layers = family_of(dense.model.config).layers(dense.model)
    blocks = output.blocks(other.model)
    split = range(record.first_dense_layers, record.num_layers)
    return {index: (layers[index].get_submodule("mlp"), blocks[index]) for index in split}, None
