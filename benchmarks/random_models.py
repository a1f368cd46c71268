"""A random dense model of a given shape and its MoE, to measure speed without training anything.

The split is random and balanced, and router logits are as spread as those of trained routers. Speed
depends on neither; quality is that of noise.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dotmoe.method.layout import ExpertLayout
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.family import family_of
from dotmoe.models.load import describe_dense

ROUTER_LOGIT_STD = 2.5
"""Deviation of the random routers' logits, for FFN inputs of unit variance."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a random Llama."""

    width: int = 1_024
    """Model width (d), a multiple of `heads`."""
    ffn_width: int = 14_336
    """FFN neurons (d_ffn)."""
    layers: int = 2
    heads: int = 16
    """Query heads."""
    kv_heads: int = 16
    """Key and value heads, a divisor of `heads`."""
    vocabulary: int = 1_024
    """Size of the vocabulary; at least 2,048 if the model is written, with a tokenizer."""
    context: int = 4_096


QWEN25_7B = Shape(
    width=3_584, ffn_width=18_944, layers=28, heads=28, kv_heads=4, vocabulary=152_064
)


def llama_config(shape: Shape, **settings: Any) -> LlamaConfig:
    """The config of a Llama of that shape, with further settings."""
    return LlamaConfig(
        hidden_size=shape.width,
        intermediate_size=shape.ffn_width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.context,
        tie_word_embeddings=False,
        **settings,
    )


def random_dense(
    shape: Shape, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> DenseModel:
    """A frozen Llama of that shape with random weights, made on the device itself."""
    config = llama_config(shape, attn_implementation="sdpa")
    torch.manual_seed(seed)
    with default_dtype(dtype), torch.device(device):
        model = LlamaForCausalLM(config)
    model.requires_grad_(False).eval()
    family = family_of(config)
    return DenseModel(model=model, weights="memory", family=family, source="random weights")


def write_random_dense(
    shape: Shape, folder: Path, dtype: torch.dtype, seed: int, device: str = "cpu"
) -> None:
    """Write a random Llama with the embedded model's tokenizer as a checkpoint folder."""
    torch.manual_seed(seed)
    with default_dtype(dtype), torch.device(device):
        model = LlamaForCausalLM(llama_config(shape, bos_token_id=None, eos_token_id=0))
    model.save_pretrained(folder)
    describe_dense("embedded").tokenizer.save_pretrained(folder)


def random_layout(shape: Shape, num_experts: int, active_experts: int, seed: int) -> ExpertLayout:
    """A random balanced split with random routers, whose entries are exact in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    numbers_N = torch.arange(num_experts).repeat_interleave(shape.ffn_width // num_experts)
    order = [torch.randperm(shape.ffn_width, generator=generator) for _ in range(shape.layers)]
    size = (shape.layers, num_experts, shape.width)
    router_LED = torch.randn(size, generator=generator) * ROUTER_LOGIT_STD / shape.width**0.5
    return ExpertLayout(
        expert_of_neuron_LN=torch.stack([numbers_N[numbers] for numbers in order]),
        router_LED=router_LED.bfloat16().float(),
        active_experts=active_experts,
    )


def random_tokens(shape: Shape, rows: int, columns: int, seed: int) -> Tensor:
    """Random token ids, [rows, columns], int32."""
    generator = torch.Generator().manual_seed(seed)
    size = (rows, columns)
    return torch.randint(shape.vocabulary, size, generator=generator, dtype=torch.int32)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within this context, new parameters have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
