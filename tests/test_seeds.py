"""Random numbers: no two of seed, purpose and layer draw the same, and each draws its own again."""

import pytest
import torch

from dotmoe.common.seeds import PURPOSES, generator_for


def drawn(*which):
    return tuple(torch.randint(2**60, (4,), generator=generator_for(*which)).tolist())


def test_each_seed_purpose_and_layer_draws_its_own_numbers():
    which = [(s, p, n) for s in range(5) for p in PURPOSES for n in (*range(12), 1023)]
    which += [(2**20 - 1, "ffn", 0), (2**20 - 1, PURPOSES[-1], 1023)]
    assert len({drawn(*each) for each in which}) == len(which)
    assert drawn(3, "attention", 7) == drawn(3, "attention", 7)


@pytest.mark.parametrize("layer", [-1, 1024])
def test_a_layer_that_would_draw_as_another_is_refused(layer):
    with pytest.raises(ValueError, match="layer is"):
        generator_for(0, "ffn", layer)
