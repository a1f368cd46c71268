"""Stage for conversions without data: blocks of text sampled from the dense model itself."""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from dotmoe.data import SELF, BlockWriter, PackedSources, TokenBlocks
from dotmoe.models.dense import DenseModel
from dotmoe.options import above, at_least

NOTE = "text that the dense model itself sampled"
"""What to call such text where it was measured on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig:
    """How text is sampled where `data` is `self`."""

    sample_tokens: Annotated[int | None, at_least(2)] = None
    """Tokens to sample for training, at most. Default: as many as the steps use."""
    sample_temperature: Annotated[float, above(0)] = 1.0
    """Divides the logits; 1: the model's own distribution. Nothing is cut off from it."""
    sample_batch_size: Annotated[int, at_least(1)] = 16
    """Blocks sampled side by side: more is faster and takes more memory (their keys and values)."""


def sample_blocks(
    dense: DenseModel,
    config: SampleConfig,
    path: Path,
    *,
    seq_len: int,
    num_tokens: int,
    seed: int,
    on_progress: Callable[[int], None] = lambda done: None,
) -> PackedSources:
    """Blocks of ancestral samples of the dense model, written to a file.

    Each block is a sample of its own; see `sampled_rows`. Finished batches are kept beside `path`
    until all are done, so that a process that was killed goes on where it was. A batch is a pure
    function of model, config, seed and its number.

    Args:
        dense: The model.
        config: Temperature and batch size.
        path: File to write; it has this name only when it is whole.
        seq_len: Tokens of a block, 2 or more.
        num_tokens: To sample; rounded up to whole blocks.
        seed: Of the draws.
        on_progress: Told the number of tokens so far.

    Returns:
        The blocks, mapped from the file, and a record of how they were made.

    Raises:
        UserError: The disk is full.
    """
    num_blocks = -(-num_tokens // seq_len)
    parts = path.with_name(path.name + ".parts")
    parts.mkdir(exist_ok=True)
    with BlockWriter(path, seq_len) as writer:
        for number, first in enumerate(range(0, num_blocks, config.sample_batch_size)):
            part = parts / f"{number}.safetensors"
            if not part.exists():
                generator = torch.Generator(dense.device).manual_seed(_batch_seed(seed, number))
                rows = min(config.sample_batch_size, num_blocks - first)
                tokens_BT = sampled_rows(dense, rows, seq_len, config.sample_temperature, generator)
                TokenBlocks(tokens_BT).save(part)
            writer.append(TokenBlocks.load(part).tokens_BT.flatten())
            on_progress(writer.num_tokens)
        writer.finish()
    shutil.rmtree(parts)
    return PackedSources(TokenBlocks.load(path), _record(dense, config, writer.num_tokens, seq_len))


@torch.no_grad()
def sampled_rows(
    dense: DenseModel, rows: int, seq_len: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """Independent samples of the model: int32, [rows, seq_len].

    A row begins with BOS; where the tokenizer has none, with a token drawn evenly from those that
    are not special. Every token after it is drawn from the model's softmax at `temperature`, over
    the tokenizer's own tokens, given all tokens before it. A row goes on after EOS: with BOS where
    that is another token (then a document begins, as in packed text), else as the model likes.

    Args:
        dense: The model.
        rows: Samples.
        seq_len: Tokens of each, at most the model's context.
        temperature: Above 0.
        generator: Of the draws, on the model's device.
    """
    tokenizer = dense.tokenizer
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    tokens_BT = torch.empty(rows, seq_len, dtype=torch.long, device=dense.device)
    tokens_BT[:, 0] = _first_tokens(tokenizer, rows, vocabulary, generator)
    cache = DynamicCache(config=dense.config)
    restarts = _restarts(tokenizer)
    for place in range(1, seq_len):
        last_B1 = tokens_BT[:, place - 1 : place]
        output = dense.model(
            input_ids=last_B1, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        logits_BV = output.logits[:, -1, :vocabulary].float() / temperature
        drawn_B1 = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)
        if restarts:
            drawn_B1[last_B1 == tokenizer.eos_token_id] = tokenizer.bos_token_id
        tokens_BT[:, place] = drawn_B1[:, 0]
    return tokens_BT.int().cpu()


def _first_tokens(
    tokenizer: Any, rows: int, vocabulary: int, generator: torch.Generator
) -> Tensor | int:
    if tokenizer.bos_token_id is not None:
        bos: int = tokenizer.bos_token_id
        return bos
    special = set(tokenizer.all_special_ids)
    plain = torch.tensor([token for token in range(vocabulary) if token not in special])
    draws = torch.randint(len(plain), (rows,), generator=generator, device=generator.device)
    return plain.to(generator.device)[draws]


def _restarts(tokenizer: Any) -> bool:
    """Whether BOS goes after EOS: both are there, and are two tokens."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return bos is not None and eos is not None and bos != eos


def _batch_seed(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:7], "little")


def _record(
    dense: DenseModel, config: SampleConfig, num_tokens: int, seq_len: int
) -> dict[str, Any]:
    tokenizer = dense.tokenizer
    has_bos = tokenizer.bos_token_id is not None
    return {
        "tokens": num_tokens,
        "seq_len": seq_len,
        "sources": [{"name": SELF, "weight": None, "share": 1.0, "tokens": num_tokens}],
        "sampling": {
            "temperature": config.sample_temperature,
            "first_token": tokenizer.bos_token if has_bos else "drawn evenly from the plain tokens",
            "after_eos": tokenizer.bos_token if _restarts(tokenizer) else "as the model likes",
        },
        "boundaries": {
            "blocks": "each is a sample of its own",
            "attention": "causal over the whole block, across documents; not across blocks",
            "position_ids": "0 at the start of each block; they go on across documents",
            "loss": "on every token of a block but the first",
        },
    }
