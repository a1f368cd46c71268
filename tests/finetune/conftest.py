"""A layout and blocks of text for tiny models."""

import pytest
import torch

from dotmoe.data import TokenBlocks
from dotmoe.layout import ExpertLayout

LAYERS, EXPERTS, SIZE, WIDTH = 2, 6, 16, 64


@pytest.fixture
def layout():
    """Random balanced experts, 2 of 6 active."""
    assignment = torch.arange(EXPERTS).repeat_interleave(SIZE)
    return ExpertLayout(
        expert_of_neuron_LN=torch.stack(
            [assignment[torch.randperm(EXPERTS * SIZE)] for _ in range(LAYERS)]
        ),
        router_LED=torch.randn(LAYERS, EXPERTS, WIDTH),
        active_experts=2,
    )


@pytest.fixture
def blocks():
    """16 blocks of 24 tokens, of a simple pattern."""
    start = torch.randint(2, 200, (16, 1))
    return TokenBlocks((start + torch.arange(24) % 5).to(torch.int32))
