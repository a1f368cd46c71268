"""A tiny dense model, text, and what a method is given."""

import pytest
import torch

from dotmoe.baselines import BaselineConfig, SplitInputs, granularity_of
from dotmoe.calibrate import CalibrateConfig
from dotmoe.granularity import Granularity
from dotmoe.load import LoadConfig, load_dense

SPLIT = Granularity(num_experts=12, expert_size=8, active_experts=4)


@pytest.fixture
def dense(tiny_dense):
    return load_dense(str(tiny_dense("llama")), LoadConfig(device="cpu"))


@pytest.fixture(name="tokens_BT")
def random_tokens():
    return torch.randint(2, 258, (6, 24), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def given(dense, tokens_BT):
    """What a method of a name is given."""

    def make(method, seed=0, **options):
        config = BaselineConfig(**{"cluster_starts": 1} | options)
        return SplitInputs(
            dense=dense,
            tokens_BT=tokens_BT,
            granularity=granularity_of(method, SPLIT, config),
            config=config,
            calibrate=CalibrateConfig(),
            seed=seed,
        )

    return make
