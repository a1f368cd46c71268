"""A tiny model, text, and a finished run with a few alignment steps."""

import pytest
import torch

from dotmoe.cli import run
from dotmoe.layout import ALWAYS_ON, ExpertLayout
from dotmoe.load import LoadConfig, load_dense

E, K = 12, 3


@pytest.fixture
def dense(tiny_dense):
    return load_dense(str(tiny_dense("llama")), LoadConfig(device="cpu"))


@pytest.fixture
def tokens():
    generator = torch.Generator().manual_seed(3)
    return torch.randint(2, 258, (10, 24), generator=generator, dtype=torch.int32)


@pytest.fixture
def layout(dense):
    """Random experts; the first layer stays dense."""
    widths = dense.widths
    generator = torch.Generator().manual_seed(1)
    order = [torch.randperm(widths.ffn, generator=generator) for _ in range(widths.layers)]
    expert_of_neuron_LN = torch.stack([numbers % E for numbers in order])
    expert_of_neuron_LN[0] = ALWAYS_ON
    return ExpertLayout(
        expert_of_neuron_LN=expert_of_neuron_LN,
        router_LED=torch.randn(widths.layers, E, widths.model, generator=generator),
        active_experts=K,
    )


@pytest.fixture(scope="session")
def aligned(tiny_dense, tmp_path_factory):
    """Folder of a run with four alignment steps; copy it before changing it."""
    folder = tmp_path_factory.mktemp("aligned")
    text = folder / "text.txt"
    text.write_text("\n".join(f"Line {i}: the crow ate {i * 7 % 13} figs." for i in range(400)))
    options = ["--expert-size", "8", "--steps", "4", "--batch-size", "4", "--seq-len", "32"]
    options += ["--eval-tokens", "512", "--calibration-tokens", "512", "--scale-tokens", "256"]
    options += ["--verify-tokens", "128", "--lr", "0.05"]
    command = ["convert", str(tiny_dense("llama")), str(folder / "run"), "--data", str(text)]
    assert run([*command, *options]) == 0
    return folder / "run"
