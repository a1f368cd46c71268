"""Alignment on several ranks. Oracle: the same on one rank."""

import pytest
import torch
from safetensors.torch import load_file
from watched_alignment import STEPS, do, read_sizes, shared_failures, watched_run

from runs import on_ranks

VARIANTS = {
    "replicated": {"sharding": "replicate"},
    "sharded, recomputed": {"sharding": "shard", "recompute": True},
}
FIGURES = ("loss", "kl", "ce", "z", "balance", "marginal_error", "moved_fraction", "soft_hard_gap")


def seen_on(ranks, jobs, out):
    """Does jobs of `watched_alignment` on several ranks; returns what each rank saw, by name."""
    on_ranks(ranks, do, jobs, out)
    return {name: [torch.load(out / f"{name}.{rank}.pt") for rank in range(ranks)] for name in jobs}


def require_same_alignment(seen, alone, first_step=1):
    """Ranks agree bit for bit; with one rank bit for bit on what is rounded, else nearly."""
    one = seen[0]
    for each in seen:
        assert torch.equal(each["assignments"], one["assignments"])
        for key in ("start", "gradients", "end"):
            assert all(map(torch.equal, each[key], one[key])), key
        for step, values in each["metrics"].items():
            assert values | {"seconds": 0} == one["metrics"][step] | {"seconds": 0}
    assert all(map(torch.equal, one["start"], alone["start"]))
    for here, there in zip(one["gradients"], alone["gradients"], strict=True):
        assert (here - there).abs().max() < 2e-6 * there.abs().max()
    assert list(one["metrics"]) == list(range(first_step, STEPS + 1))
    for step, values in one["metrics"].items():
        there = alone["metrics"][step]
        for name in FIGURES:
            assert values[name] == pytest.approx(there[name], rel=1e-5, abs=2e-6), (step, name)
        assert values["grad_norm"] == pytest.approx(there["grad_norm"], rel=1e-4)
    assert (one["assignments"][-1] != alone["assignments"][-1]).float().mean() < 0.01


@pytest.fixture(scope="module")
def model(tiny_dense):
    return tiny_dense("llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """What one rank sees."""
    return watched_run(str(model), tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def two(alone, model, tmp_path_factory):
    """What two ranks see, in one start of them, after it; one of their runs one rank has begun."""
    folder = tmp_path_factory.mktemp("two")
    watched_run(str(model), folder / "resumed", stop_after=3)  # with a checkpoint of 2
    runs = VARIANTS | {"resumed": {}, "stopped": {"stop_after": 3}}
    jobs = {
        name: (watched_run, {"model": str(model), "folder": folder / name} | options)
        for name, options in runs.items()
    }
    jobs |= {"reads": (read_sizes, {"model": str(model)}), "failures": (shared_failures, {})}
    return seen_on(2, jobs, folder) | {"folder": folder}


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_align_as_one_does(variant, two, alone):
    seen = two[variant]
    require_same_alignment(seen, alone)
    assert torch.equal(seen[0]["assignments"][0], alone["assignments"][0])
    assert [each["own_layers"] for each in seen] == [2, 1]
    assert len(seen[0]["assignments"]) == STEPS


def test_a_run_goes_on_with_another_number_of_ranks(two, model, alone):
    require_same_alignment(two["resumed"], alone, first_step=3)
    require_same_alignment([watched_run(str(model), two["folder"] / "stopped")], alone, 3)


def test_a_rank_reads_its_rows_and_nothing_else(two, model):
    stored = load_file(model / "model.safetensors")
    rows = {name: torch.chunk(tensor, 2) for name, tensor in stored.items()}
    for rank, seen in enumerate(two["reads"]):
        own = sorted(parts[rank].nbytes for parts in rows.values())
        assert sorted(seen["reads"]) == own
        assert seen["held"] == sum(own)


def test_an_error_on_one_rank_is_told_to_all(two):
    assert two["failures"] == [
        [0, "rank 1: no file on 1", "no file on 0"],
        [1, "rank 1: no file on 1", "rank 0: no file on 0"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "phi3", "granite", "olmo2"])
def test_four_ranks_align_other_families_as_one_does(family, tiny_dense, tmp_path):
    """Tied heads, biases, fused projections, multipliers; and a rank without a layer."""
    model = tiny_dense(family, tied=family in ("qwen2", "granite"), num_hidden_layers=3)
    alone = watched_run(str(model), tmp_path / "alone")
    jobs = {
        how: (watched_run, {"model": str(model), "folder": tmp_path / how, "sharding": how})
        for how in ("replicate", "shard")
    }
    for seen in seen_on(4, jobs, tmp_path).values():
        require_same_alignment(seen, alone)
        assert [each["own_layers"] for each in seen] == [1, 1, 1, 0]
