"""Random generators: one for each seed, purpose and layer, none of which draws as another does."""

import torch

PURPOSES = ("ffn", "attention", "adapters", "repair")
"""What random numbers are drawn for: the start of each target, and what training starts from."""
MOST_LAYERS = 1024


def generator_for(seed: int, purpose: str, layer: int = 0) -> torch.Generator:
    """A new generator on the CPU, for one of `PURPOSES` and one layer, below 1024.

    Seed, purpose and layer are the digits of one number, so that no two of them share it. Torch
    reads its last 32 bits, which tell seeds below 2^20 apart.
    """
    if not 0 <= layer < MOST_LAYERS:
        raise ValueError(
            f"layer is {layer}, but generators are told apart for 0 to {MOST_LAYERS - 1}"
        )
    number = (seed * len(PURPOSES) + PURPOSES.index(purpose)) * MOST_LAYERS + layer
    return torch.Generator().manual_seed(number % 2**32)
