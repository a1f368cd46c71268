"""What one rank has, and what it makes of errors. Oracle: torch.chunk, as DTensor cuts."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from dotmoe.common import distributed
from dotmoe.common.distributed import process_group
from dotmoe.common.errors import UserError
from dotmoe.common.sharded import divided, own_rows


@pytest.fixture
def fake_ranks():
    """A group of many ranks in this process, which sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(ranks, rank):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        return dist.device_mesh.init_device_mesh("cpu", (ranks,))

    yield start
    dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (3, 2), (8, 1), (8, 7)])
def test_ranks_own_the_chunks_of_torch(ranks, rank, fake_ranks):
    mesh = fake_ranks(ranks, rank)
    for length in (1, 2, 5, 7, 8, 31):
        rows = torch.arange(2.0 * length).view(length, 2)
        chunks = [*rows.chunk(ranks), *[rows[:0]] * ranks]
        part = divided(rows, mesh)
        assert part.shape == rows.shape
        assert torch.equal(part.to_local(), chunks[rank])
        assert torch.equal(rows[own_rows(part)], chunks[rank])
    whole = DTensor.from_local(rows, mesh, [Replicate()], run_check=False)
    assert own_rows(whole) == slice(0, 31)
    assert part.placements == (Shard(0),)


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
        dist.DistNetworkError("The client socket has failed to connect"),
        RuntimeError("[/pytorch/third_party/gloo/gloo/tcp/pair.cc:534] Connection closed"),
    ],
)
def test_a_lost_rank_is_one_line_whatever_connects_them(error, monkeypatch):
    monkeypatch.setattr(distributed, "started_by_torchrun", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", lambda *arguments, **options: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    cpu = torch.device("cpu")
    with pytest.raises(UserError, match="another rank has gone"), process_group(cpu):
        raise error
    with pytest.raises(RuntimeError, match="shape"), process_group(cpu):
        raise RuntimeError("shape mismatch")
