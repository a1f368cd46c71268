"""Which rank owns which layer. Oracle: torch.chunk, which is how DTensor cuts."""

from dataclasses import dataclass

import pytest
import torch

from dotmoe.distributed import Division, from_first, on_every_rank, require_equal_shares


@dataclass
class Line:
    """As much of a DeviceMesh as a division asks for."""

    ranks: int
    rank: int

    def size(self):
        return self.ranks

    def get_local_rank(self):
        return self.rank


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 8, 31])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_own_the_chunks_of_torch(length, ranks):
    layers = torch.arange(length)
    chunks = [chunk.tolist() for chunk in layers.chunk(ranks)]
    chunks += [[]] * (ranks - len(chunks))
    owned = [layers[Division(length, Line(ranks, rank)).own].tolist() for rank in range(ranks)]
    assert owned == chunks


def test_rounds_name_each_layer_once_and_a_rank_at_most_once_a_round():
    division = Division(7, Line(3, 0))
    assert list(division.rounds()) == [[0, 3, 6], [1, 4], [2, 5]]


def test_alone_nothing_is_divided():
    division = Division(5, None)
    whole = torch.rand(5, 2)
    assert torch.equal(division.divided(whole), whole)
    assert division.gathered(whole) is whole
    assert torch.equal(division.summed(whole), whole)
    assert division.own == slice(0, 5)
    assert list(division.rounds()) == [[0], [1], [2], [3], [4]]
    assert from_first(lambda: 3) == on_every_rank(lambda: 3) == 3
    require_equal_shares(7)
