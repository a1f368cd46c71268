"""A layout and blocks of text for tiny models."""

from types import SimpleNamespace

import pytest
import torch
from two_ranks import unloaded_dense

from dotmoe.method.config import FinetuneConfig
from dotmoe.method.finetuning import Student
from dotmoe.text.blocks import TokenBlocks


@pytest.fixture
def blocks():
    """16 blocks of 24 tokens, of a simple pattern."""
    start = torch.randint(2, 200, (16, 1))
    return TokenBlocks((start + torch.arange(24) % 5).to(torch.int32))


@pytest.fixture
def new_student(layout, ranks):
    """Makes a student of a checkpoint folder."""

    def make(folder, config=None, dtype="float32", *, layout=layout, seed=0):
        dense = unloaded_dense(str(folder), getattr(torch, dtype))
        return Student(dense, layout, config or FinetuneConfig(), ranks, seed=seed)

    return make


@pytest.fixture
def layout(layout_of):
    """Random balanced experts, 2 of 6 active, of every tiny model."""
    widths = SimpleNamespace(layers=2, ffn=96, model=64)
    return layout_of(SimpleNamespace(widths=widths), 6, active_experts=2)
