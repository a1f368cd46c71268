"""Overlap of routing. Oracle: routing that is alike or independent by making."""

from types import SimpleNamespace

import pytest
import torch

from dotmoe.analyse.overlap import matched_overlap, values
from dotmoe.analyse.routing import Routes

E, K, T = 8, 2, 4000


def random_choice(seed, loads=None):
    generator = torch.Generator().manual_seed(seed)
    loads = torch.ones(E) if loads is None else loads
    return torch.multinomial(loads.expand(T, E), K, generator=generator).to(torch.int16)


def test_renamed_experts_are_the_same_routing():
    a = random_choice(0)
    renamed = torch.randperm(E, generator=torch.Generator().manual_seed(1))[a.long()]
    assert matched_overlap(a, renamed.to(torch.int16), E) == pytest.approx(1.0)


def test_layers_that_know_nothing_of_each_other_share_nothing():
    uneven = torch.tensor([6.0, 4, 3, 2, 1, 1, 1, 1])
    for a, b in (
        (random_choice(0), random_choice(1)),
        (random_choice(2, uneven), random_choice(3)),
    ):
        assert matched_overlap(a, b, E) == pytest.approx(0.0, abs=0.03)
        assert matched_overlap(a, b, E) == pytest.approx(matched_overlap(b, a, E))


def test_few_tokens_do_not_look_alike_by_the_pairing():
    """Pairs that were found on the very tokens they are measured on would share 0.25 here."""
    pairs = [(random_choice(2 * n)[:60], random_choice(2 * n + 1)[:60]) for n in range(40)]
    mean = sum(matched_overlap(a, b, E) for a, b in pairs) / len(pairs)
    assert mean == pytest.approx(0.0, abs=0.03)


def test_half_the_tokens_alike_share_half():
    a, b = random_choice(0), random_choice(1)
    mixed = torch.where((torch.arange(T) % 2 == 0)[:, None], a, b)
    assert matched_overlap(a, mixed, E) == pytest.approx(0.5, abs=0.03)


def test_where_all_experts_run_all_layers_are_alike():
    everything = torch.arange(E, dtype=torch.int16).repeat(T, 1)
    assert matched_overlap(everything, everything.flip(1), E) == 1.0


def test_the_table_is_symmetric_and_names_its_layers():
    a, b = random_choice(0), random_choice(1)
    chosen = torch.stack([a, b, a.flip(1)])
    routes = Routes(layers=(1, 2, 3), chosen_LTK=chosen, num_experts=E)
    found = values(SimpleNamespace(routes=routes))
    table = torch.tensor(found["similarity_LL"])
    assert found["layers"] == [1, 2, 3]
    assert torch.equal(table, table.T)
    assert table.diagonal().tolist() == [1.0, 1.0, 1.0]
    assert table[0, 2] == pytest.approx(1.0)
    assert abs(table[0, 1]) < 0.03
