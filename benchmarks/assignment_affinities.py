"""Affinities of any shape, as sharp and as skewed as those of a measured alignment."""

from typing import Any

import torch
from torch import Tensor


def affinities(profile: dict[str, Any], num_neurons: int, num_experts: int, seed: int) -> Tensor:
    """Affinities drawn from a stage of `assignment_profile.py`, [N, E].

    Row means, column means and the rest are independent: the first two normal, the rest by its
    quantiles.
    """
    generator = torch.Generator().manual_seed(seed)
    quantiles = torch.tensor(profile["rest_quantiles"])
    place_NE = torch.rand(num_neurons, num_experts, generator=generator) * (len(quantiles) - 1)
    below_NE = place_NE.long().clamp_max(len(quantiles) - 2)
    rest_NE = torch.lerp(quantiles[below_NE], quantiles[below_NE + 1], place_NE - below_NE)
    row_N1 = profile["row_std"] * torch.randn(num_neurons, 1, generator=generator)
    column_E = profile["column_std"] * torch.randn(num_experts, generator=generator)
    return rest_NE + row_N1 + column_E


def one_step_later(profile: dict[str, Any], affinity_NE: Tensor, seed: int) -> Tensor:
    """The same affinities after an optimizer step of the measured size."""
    generator = torch.Generator().manual_seed(seed + 1)
    num_neurons, num_experts = affinity_NE.shape
    noise_NE = torch.randn(num_neurons, num_experts, generator=generator)
    column_E = torch.randn(num_experts, generator=generator)
    return (
        affinity_NE * (1.0 + profile["change_growth"])
        + profile["change_rest_std"] * noise_NE
        + profile["change_column_std"] * column_E
    )


def normal_profile(*, std: float, tau: float, change: float) -> dict[str, Any]:
    """A profile that was not measured: normal affinities, and changes, of given deviations."""
    levels = torch.linspace(0, 1, 1025, dtype=torch.float64).clamp(1e-5, 1 - 1e-5)
    return {
        "tau": tau,
        "next_tau": tau,
        "rest_quantiles": (std * torch.special.ndtri(levels)).tolist(),
        "row_std": 0.0,
        "column_std": 0.0,
        "change_growth": 0.0,
        "change_column_std": 0.0,
        "change_rest_std": change,
    }
