"""Tiny dense models, random layouts for them, and text; llama.cpp only where it is installed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("gguf")

from dotmoe.artifacts import DenseModel
from dotmoe.layout import ALWAYS_ON, ExpertLayout
from dotmoe.load import LoadConfig, load_dense

MakeLayout = Callable[..., ExpertLayout]
MakeDense = Callable[..., DenseModel]


def random_layout(
    dense: DenseModel,
    *,
    num_experts: int = 12,
    active_experts: int = 3,
    shared_size: int = 0,
    dense_layers: int = 0,
) -> ExpertLayout:
    """Balanced experts at random; router logits have a standard deviation near 1.5."""
    widths = dense.widths
    generator = torch.Generator().manual_seed(5)
    experts = torch.arange(num_experts).repeat_interleave((widths.ffn - shared_size) // num_experts)
    experts = torch.cat([torch.full((shared_size,), ALWAYS_ON), experts])
    assignment = torch.stack(
        [experts[torch.randperm(widths.ffn, generator=generator)] for _ in range(widths.layers)]
    )
    assignment[:dense_layers] = ALWAYS_ON
    router = torch.randn(widths.layers, num_experts, widths.model, generator=generator)
    router = router * 1.5 / widths.model**0.5
    return ExpertLayout(
        expert_of_neuron_LN=assignment,
        router_LED=router - router.mean(dim=1, keepdim=True),
        active_experts=active_experts,
    )


@pytest.fixture(scope="session")
def layout_of() -> MakeLayout:
    """`random_layout`."""
    return random_layout


@pytest.fixture(scope="session", name="tokens_BT")
def text_tokens() -> Tensor:
    """Token ids that every tiny tokenizer knows: four rows of English bytes."""
    text = (
        "The clockmaker's daughter wound the tower clock each morning at 6:45, and nobody in the "
        "village knew that the bells had been silent for 30 years before she came. 'It is only "
        "a matter of patience,' she said, and oiled the third wheel again. On the last day of "
        "October the weights fell, all 3 of them, and the hands stood still at noon; she laughed."
    )
    ids = torch.tensor([2 + byte for byte in text.encode()[:320]])
    return ids.view(4, 80)


@pytest.fixture
def dense_of(tiny_dense: Any) -> MakeDense:
    """Loads a tiny dense model: the arguments of `tiny_dense`."""

    def make(family_name: str, **arguments: Any) -> DenseModel:
        folder: Path = tiny_dense(family_name, **arguments)
        return load_dense(str(folder), LoadConfig(device="cpu", dtype="float32"))

    return make


@pytest.fixture(scope="session")
def llama_cpp() -> None:
    """Skips where llama-cpp-python is not installed."""
    pytest.importorskip("llama_cpp")
