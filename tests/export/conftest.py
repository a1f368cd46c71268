"""A random balanced layout whose router makes well-spread choices, and text to look at it with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dotmoe.artifacts import DenseModel
from dotmoe.layout import ExpertLayout
from dotmoe.load import LoadConfig, load_dense

MakeLayout = Callable[..., ExpertLayout]
MakeDense = Callable[..., DenseModel]


def random_layout(
    dense: DenseModel, *, num_experts: int = 12, active_experts: int = 3, dtype: Any = None
) -> ExpertLayout:
    """Logit standard deviation near 1.5: FFN inputs leave a norm, so their entries are near 1."""
    widths = dense.widths
    generator = torch.Generator().manual_seed(5)
    capacity = widths.ffn // num_experts
    experts = torch.arange(num_experts).repeat_interleave(capacity)
    assignment = torch.stack(
        [experts[torch.randperm(widths.ffn, generator=generator)] for _ in range(widths.layers)]
    )
    router = torch.randn(widths.layers, num_experts, widths.model, generator=generator)
    router = router * 1.5 / widths.model**0.5
    router = router - router.mean(dim=1, keepdim=True)
    return ExpertLayout(
        expert_of_neuron_LN=assignment,
        router_LED=router.to(dtype or torch.float32).float(),
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
        "The miller's youngest son had nothing but the cat, and sat down by the road to think "
        "about what could be made of it. 'Give me a pair of boots and a bag,' said the cat, 'and "
        "you will see that your share is not so bad as it looks.' Numbers: 3.14159, 2.71828; "
        "def f(x): return x * (x - 1) // 2  # triangular. Then they went on, one behind the "
        "other, over seven hills and through seven valleys, and nobody counted them but the crows."
    )
    ids = torch.tensor([2 + byte for byte in text.encode()[:384]])
    return ids.view(4, 96)


@pytest.fixture
def dense_of(tiny_dense: Any) -> MakeDense:
    """Loads a tiny dense model: the arguments of `tiny_dense`, and `load_dtype`."""

    def make(family_name: str, *, load_dtype: Any = "float32", **arguments: Any) -> DenseModel:
        folder: Path = tiny_dense(family_name, **arguments)
        return load_dense(str(folder), LoadConfig(device="cpu", dtype=load_dtype))

    return make
