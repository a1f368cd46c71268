"""How close a model is to its dense model: hidden states, logits, and the output of each FFN."""

from collections import defaultdict
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dotmoe.common.errors import UserError
from dotmoe.common.files import Values
from dotmoe.common.progress import Progress
from dotmoe.common.tables import Table, figure, percent, table_of
from dotmoe.export.architectures import FORMATS
from dotmoe.export.record import RECORD_FILE, ExportRecord
from dotmoe.measure.config import EvaluateConfig
from dotmoe.measure.evaluate.difference import IncomparableError, error_of_mean
from dotmoe.measure.evaluate.models import (
    StockModel,
    dense_model_of,
    loaded,
    model_folder,
    require_unchanged_dense,
)
from dotmoe.measure.evaluate.perplexity import packed_text, text_names
from dotmoe.models.family import family_of
from dotmoe.models.identity import FINGERPRINT, fingerprint
from dotmoe.models.scoring import hidden_states, logits_in_parts
from dotmoe.models.targets import TARGETS


@torch.no_grad()
def measure_fidelity(config: EvaluateConfig, progress: Progress) -> Values:
    """Compare a model with its dense model, both run on the same windows of `config.corpus.text`.

    `before_head` and `after_head` are tab:output_aware_similarity, and the `mse` of a layer's `ffn`
    is tab:motivation_mse_combined; docs/guides/evaluate.md defines the metrics. Tokens after
    the last full window are left out, unless there is no full window. `ffn` is empty if the MoE
    blocks are not known, or do not contain the whole FFN.
    """
    folder = model_folder(config.model)
    record = ExportRecord.load(folder) if (folder / RECORD_FILE).is_file() else None
    if not (config.against or record):
        raise UserError(
            f"{config.model} is no export of dotmoe, so its dense model is not known. Name it "
            "with --against."
        )
    against = config.against or dense_model_of(folder, "--against")
    of_dense = model_folder(against)
    require_unchanged_dense(folder, of_dense)
    dense, other = loaded(of_dense, config.load), loaded(folder, config.load)
    tokens = _tokens_of_both(config, against, dense, other)
    window = config.corpus.window_in(min(dense.context, other.context))
    full = tokens[: tokens.numel() // window * window]
    rows = full.view(-1, window) if len(full) else tokens[None]
    ffns = _ffns(dense.model, other.model, record) if record else {}
    sums = _Sums()
    for layer, (ffn, block) in ffns.items():
        ffn.register_forward_hook(partial(sums.compare_ffns, layer, block))
    with progress.bar("evaluate", tokens=1) as update:
        for batch in torch.split(rows, config.corpus.windows_at_once):
            sums.compare_windows(dense.model, other.model, batch)
            update(sums.tokens, rows.numel())
    return {
        "against": against,
        FINGERPRINT: {"model": fingerprint(folder), "against": fingerprint(of_dense)},
        "dtype": {"model": other.dtype, "against": dense.dtype},
        "before_head": sums.closeness("before"),
        "after_head": sums.closeness("after"),
        "kl": sums.kl / sums.tokens,
        "kl_stderr": error_of_mean(sums.window_kls),
        "window_kls": sums.window_kls,
        "top1_agreement": sums.same_top1 / sums.tokens,
        "ffn": [{"layer": layer, **sums.closeness(layer)} for layer in ffns],
        "tokens": sums.tokens,
        "text": list(config.corpus.text),
        "window": window,
    }


def _tokens_of_both(
    config: EvaluateConfig, against: str, dense: StockModel, other: StockModel
) -> Tensor:
    """Token ids of `config.corpus.text`; an error unless both models read and predict the same."""
    for key in ("vocab_size", "hidden_size"):
        ours, theirs = (getattr(each.model.config, key) for each in (other, dense))
        if ours != theirs:
            raise UserError(
                f"{key} is {ours} in the model and {theirs} in the one to compare it with, so one "
                "was not made from the other. Name the dense model with --against."
            )
    tokens = packed_text(config.corpus, dense.tokenizer).tokens
    if not torch.equal(tokens, packed_text(config.corpus, other.tokenizer).tokens):
        raise IncomparableError(
            f"{config.model} and {against} have tokenizers that cut the text differently, so their "
            "predictions do not compare. Name the dense model that the other was made from with "
            "--against."
        )
    return tokens


class _Sums:
    """Sums over tokens of how close a model is to the dense one."""

    def __init__(self) -> None:
        self.tokens = 0
        self.same_top1 = 0
        self.kl = 0.0
        self.window_kls = list[float]()
        """Mean KL divergence of each window."""
        self._at: dict[str | int, Tensor] = defaultdict(lambda: torch.zeros(3, dtype=torch.float64))
        """The `_sums_over_tokens` before and after the head, and of the FFN of each layer."""

    def compare_ffns(
        self, layer: int, block: Any, _: nn.Module, inputs: Any, output: Tensor
    ) -> None:
        """Hook of a dense FFN: run the other model's block on the same input."""
        self._at[layer] += _sums_over_tokens(block(inputs[0]).flatten(0, 1), output.flatten(0, 1))

    def compare_windows(self, dense: nn.Module, other: nn.Module, batch: Tensor) -> None:
        """Run both models on windows, [B, T], and add what they predict."""
        dense_TD = hidden_states(dense, batch).flatten(0, 1)
        other_TD = hidden_states(other, batch).flatten(0, 1)
        self._at["before"] += _sums_over_tokens(other_TD, dense_TD)
        logits = logits_in_parts(dense, dense_TD), logits_in_parts(other, other_TD)
        kls = list[Tensor]()
        for (_, dense_TV), (_, other_TV) in zip(*logits, strict=True):
            self._at["after"] += _sums_over_tokens(other_TV, dense_TV)
            is_same_T = other_TV.argmax(dim=1) == dense_TV.argmax(dim=1)
            self.same_top1 += int(is_same_T.sum())
            dense_log, other_log = dense_TV.log_softmax(dim=1), other_TV.log_softmax(dim=1)
            kl_TV = F.kl_div(other_log, dense_log, log_target=True, reduction="none")
            kls.append(kl_TV.sum(dim=1).double().cpu())
            self.kl += float(kls[-1].sum())
        self.window_kls += torch.cat(kls).view(batch.shape).mean(dim=1).tolist()
        self.tokens += batch.numel()

    def closeness(self, place: str | int) -> dict[str, float]:
        """Means over the tokens at one place."""
        cosine, mse, mean_square = (self._at[place] / self.tokens).tolist()
        return {"cosine": cosine, "mse": mse, "relative_mse": mse / mean_square}


def _ffns(dense: Any, other: Any, record: ExportRecord) -> dict[int, tuple[nn.Module, Any]]:
    """For each split layer the dense FFN, and a function from its input to the other's output."""
    output = FORMATS[record.format]
    has_heads = record.details.get("splits", [{}])[0].get("target") == "attention"
    if has_heads or (record.shared_size and not output.block_has_shared):
        return {}
    family = family_of(dense.config)
    layers = family.layers(dense)
    blocks = output.blocks(other)
    split = range(record.first_dense_layers, record.num_layers)
    return {index: (family.block(layers[index], TARGETS["ffn"]), blocks[index]) for index in split}


def _sums_over_tokens(other_TD: Tensor, dense_TD: Tensor) -> Tensor:
    """Sums over tokens: cosine, mean squared difference, mean square of the dense entries."""
    other_TD, dense_TD = other_TD.float(), dense_TD.float()
    cosine_T = F.cosine_similarity(other_TD, dense_TD, dim=1)
    mse_T = (other_TD - dense_TD).square().mean(dim=1)
    return torch.stack([cosine_T, mse_T, dense_TD.square().mean(dim=1)]).double().sum(dim=1).cpu()


def fidelity_table(result: Values) -> Table:
    """Closeness to the dense model before and after the head, and of each FFN."""
    places = {"before the LM head": result["before_head"], "logits": result["after_head"]}
    places |= {f"FFN output, layer {each['layer']}": each for each in result["ffn"]}
    error = ""
    stderr = result.get("kl_stderr")
    if stderr is not None:
        error = f" (± {stderr:.4f} over {len(result.get('window_kls', ()))} windows)"
    return table_of(
        places.items(),
        {
            "place": lambda row: row[0],
            "cosine": lambda row: f"{row[1]['cosine']:.4f}",
            "MSE": lambda row: figure(row[1]["mse"]),
            "MSE / mean square": lambda row: f"{row[1]['relative_mse']:.4f}",
        },
        title=f"{result['name']} beside {result['against']}, {result['tokens']:,} tokens",
        note=f"KL {result['kl']:.4f} nats per token{error}, same most likely token for "
        f"{percent(result['top1_agreement'])}. FFNs are fed with the dense input. "
        f"Text: {text_names(result)}.",
    )
