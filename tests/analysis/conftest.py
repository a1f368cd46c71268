"""A tiny model, and tokens to route."""

import pytest
import torch


@pytest.fixture
def dense(dense_of):
    return dense_of("llama")


@pytest.fixture
def tokens():
    generator = torch.Generator().manual_seed(3)
    return torch.randint(2, 258, (10, 24), generator=generator, dtype=torch.int32)
