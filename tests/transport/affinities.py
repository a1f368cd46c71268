"""Scores to solve transport problems of."""

import torch
from torch import Tensor


def affinity(*shape: int, std: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return std * torch.randn(*shape, generator=generator, dtype=torch.float64)
