"""Stage tokenise: text, or samples of the dense model -> training blocks and held-out blocks."""

import hashlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from transformers import DynamicCache

from dotmoe.common.files import read_json, write_json
from dotmoe.common.progress import Progress, Update
from dotmoe.models.family import DenseModel
from dotmoe.models.hooks import cached
from dotmoe.text.blocks import (
    Record,
    TokenBlocks,
    block_writer,
    overlap,
    pack_sources,
    split_off_tail,
    write_decontaminated,
)
from dotmoe.text.config import DataConfig, SampleConfig
from dotmoe.text.sources import SELF, documents, sources_of

_TRAINING, _HELDOUT, _RECORD = "training.safetensors", "heldout.safetensors", "data.json"
OTHER = "other.safetensors"
"""File with blocks of a second text to evaluate on, in the stage's folder."""
_READ_FOR_ONE = 8
"""Tokens read per token drawn from the text: the first documents alone may share one topic."""
HELDOUT_FILES = (_HELDOUT, _RECORD)
"""Files in the stage's folder that hold and describe the held-out text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Training blocks, and held-out blocks that are never trained on."""

    training: TokenBlocks
    heldout: TokenBlocks
    heldout_name: tuple[str, ...]
    """Name of the held-out text: its files, or a description of where its blocks come from."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Map what `tokenise` wrote into memory."""
        return cls(
            training=TokenBlocks.load(folder / _TRAINING),
            heldout=TokenBlocks.load(folder / _HELDOUT),
            heldout_name=tuple(read_json(folder / _RECORD)["heldout_name"]),
        )


def require_sources(data: DataConfig, eval_text: tuple[str, ...]) -> None:
    """Raise `UserError` for sources that do not exist, before anything is loaded."""
    if not samples_itself(data):
        sources_of(data)
    if eval_text:
        documents(_in_order(data, eval_text))


def samples_itself(data: DataConfig) -> bool:
    """Whether the training text is sampled from the dense model."""
    return data.data == (SELF,)


def tokenise(
    data: DataConfig,
    sample: SampleConfig,
    dense: DenseModel,
    folder: Path,
    *,
    blocks: int,
    min_tokens: int = 0,
    eval_text: tuple[str, ...],
    eval_tokens: int,
    progress: Progress,
    beside: Text | None = None,
) -> Text:
    """Write blocks of training and held-out text, and a record of both, into the stage's folder.

    `blocks` blocks of training text are read, or more if calibration and repair need `min_tokens`
    tokens drawn evenly from the whole. The block length is at most the model's context.

    The held-out text, at most `eval_tokens` tokens, is `eval_text`; else that of `beside`, the text
    of the run that is finetuned; else the last training blocks. With `beside`, blocks that are part
    of the held-out text are left out of training. Raises `UserError` if a source cannot be read, or
    there is too little text or disk space. A share of `eval_text` that is training text, also that
    of `beside`, is printed, recorded as `overlap`, and part of the name of the held-out text.
    """
    if data.seq_len > dense.widths.context:
        data = replace(data, seq_len=dense.widths.context)
        progress.log(f"seq_len lowered to {data.seq_len}, the context of the model")
    if samples_itself(data):
        tokens = max(blocks * data.seq_len, min_tokens)
        tokens = min(tokens, sample.sample_tokens or tokens)
        origin = "text that the dense model itself sampled"
    else:
        tokens = max(blocks * data.seq_len, _READ_FOR_ONE * min_tokens)
        origin = "the data"

    def write(path: Path, num_tokens: int) -> Record:
        return _write_training(data, sample, dense, path, num_tokens, progress)

    training, heldout, whole = (folder / name for name in (_TRAINING, _HELDOUT, "whole"))
    record: Record = {}
    if eval_text:
        name = eval_text
        record["heldout"] = write_windows(eval_text, data, dense, heldout, eval_tokens, progress)
    elif beside is not None:
        name = beside.heldout_name
        record["heldout"] = "that of the run that is finetuned"
        beside.heldout.save(heldout)
    else:
        name = (f"blocks of {origin} kept out of training",)
        record["heldout"] = "the last blocks of the same text"
        record["training"] = write(training, tokens + eval_tokens)
        split_off_tail(training, heldout, eval_tokens)
    if beside is not None:
        # The source may contain some of the held-out text, which is left out below.
        avoided = TokenBlocks.load(heldout)
        record["training"] = write(whole, tokens + avoided.num_tokens)
        record["left_out_blocks"] = left_out = write_decontaminated(
            TokenBlocks.load(whole), avoided, training
        )
        whole.unlink()
        if left_out:
            progress.log(
                f"{left_out} blocks of training text left out: they are part of the held-out text"
            )
    elif eval_text:
        record["training"] = write(training, tokens)
    if eval_text:
        fitted = [TokenBlocks.load(training), *([beside.training] if beside else [])]
        record["overlap"] = max(overlap(blocks, TokenBlocks.load(heldout)) for blocks in fitted)
        name = _overlap_noted(name, record["overlap"], progress)
    write_json(folder / _RECORD, {**record, "heldout_name": name})
    return Text.load(folder)


def _overlap_noted(name: tuple[str, ...], share: float, progress: Progress) -> tuple[str, ...]:
    """Name of the held-out text, with the share of it that is training text."""
    if share == 0:
        return name
    progress.log(f"{share:.2%} of {', '.join(name)} is training text: results on it are no test")
    return (*name, f"{share:.2%} of it training text")


def _write_training(
    data: DataConfig,
    sample: SampleConfig,
    dense: DenseModel,
    path: Path,
    num_tokens: int,
    progress: Progress,
) -> Record:
    if not samples_itself(data):
        return _packed(data, dense, path, num_tokens, progress)
    with progress.bar("sample from the dense model", tokens=1) as update:
        return sample_blocks(dense, sample, path, data, num_tokens, update)


def write_windows(
    sources: tuple[str, ...],
    data: DataConfig,
    dense: DenseModel,
    path: Path,
    tokens: int,
    progress: Progress,
) -> Record:
    """Write blocks of a text to evaluate on; returns their record and raises as `tokenise` does."""
    windows = replace(_in_order(data, sources), seq_len=min(2048, dense.widths.context))
    return _packed(windows, dense, path, tokens, progress)


def _packed(
    data: DataConfig, dense: DenseModel, path: Path, tokens: int, progress: Progress
) -> Record:
    with progress.bar("tokenise", tokens=1) as update:
        record = pack_sources(data, dense.tokenizer, path, tokens, update)
    shares = []
    for source in record["sources"]:
        words = f"{source['name']} {source['share']:.1%} of the tokens"
        if source["weight"] is not None:
            words += f" (requested {source['weight']:.1%})"
            words += f", ran out after {source['tokens']:,}" * source["ran_out"]
        shares.append(words)
    if len(shares) > 1:
        progress.log("; ".join(shares))
    return record


def _in_order(data: DataConfig, sources: tuple[str, ...]) -> DataConfig:
    """The config with other sources, read in their own order."""
    return replace(data, data=sources, data_weights=(), shuffle_buffer=0)


# --- text of the model itself ------------------------------------------------------------------


def sample_blocks(
    dense: DenseModel,
    config: SampleConfig,
    path: Path,
    data: DataConfig,
    num_tokens: int,
    on_progress: Update,
) -> Record:
    """Sample blocks from the dense model, token by token and independently, into a file.

    Finished batches are kept, so that a killed process resumes where it stopped. A batch is a pure
    function of model, config, seed and its number.
    `num_tokens` is rounded up to whole blocks. Returns and raises as `pack_sources` does.
    """
    num_blocks, size = -(-num_tokens // data.seq_len), config.sample_batch_size
    job = {"data": asdict(data), "sample": asdict(config), "max_tokens": num_tokens}
    with block_writer(path, data.seq_len, job) as writer:
        for first in range(writer.num_tokens // data.seq_len, num_blocks, size):
            digest = hashlib.sha256(f"{data.data_seed}/{first // size}".encode()).digest()
            seed = int.from_bytes(digest[:7], "little")
            generator = torch.Generator(dense.device).manual_seed(seed)
            rows = min(size, num_blocks - first)
            tokens_BT = sampled_rows(dense, rows, data.seq_len, generator)
            writer.append(tokens_BT.flatten())
            writer.keep({})
            on_progress(min(writer.num_tokens, num_tokens), num_tokens)
    return {
        "tokens": writer.num_tokens,
        "seq_len": data.seq_len,
        "sources": [{"name": SELF, "weight": None, "share": 1.0, "tokens": writer.num_tokens}],
        "separator": "as sampled; each block is a sample of its own",
    }


@torch.no_grad()
def sampled_rows(dense: DenseModel, rows: int, seq_len: int, generator: torch.Generator) -> Tensor:
    """Independent samples of the model: int32, [rows, seq_len].

    A row begins with BOS or, if the tokenizer has none, with a token drawn uniformly from those
    that are not special. Each later token is drawn from the model's softmax over
    the tokenizer's own tokens, given all tokens before it. After EOS a row continues with BOS if
    that is another token (a new document, as in packed text), else with what the model predicts.
    `generator` must be on the model's device.
    """
    tokenizer = dense.tokenizer
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    tokens_BT = torch.empty(rows, seq_len, dtype=torch.long, device=dense.device)
    if bos is not None:
        tokens_BT[:, 0] = bos
    else:
        plain = torch.tensor(sorted(set(range(vocabulary)) - set(tokenizer.all_special_ids)))
        draws = torch.randint(len(plain), (rows,), generator=generator, device=generator.device)
        tokens_BT[:, 0] = plain.to(generator.device)[draws]
    options = cached(DynamicCache(config=dense.config))
    restarts = bos is not None and eos not in (None, bos)
    for place in range(1, seq_len):
        last_B1 = tokens_BT[:, place - 1 : place]
        output = dense.model(input_ids=last_B1, **options)
        logits_BV = output.logits[:, -1, :vocabulary].float()
        drawn_B1 = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)
        if restarts:
            drawn_B1[last_B1 == eos] = bos
        tokens_BT[:, place] = drawn_B1[:, 0]
    return tokens_BT.int().cpu()
