import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dotmoe.errors import UserError
from dotmoe.export import ExportConfig, export
from dotmoe.export.architecture import TensorSpec
from dotmoe.export.shard_writer import plan_shards, write_shards
from dotmoe.export.staging import staging

SOURCE = Path(__file__).parents[2] / "src"


def spec_of(name, tensor, make=None):
    return TensorSpec(
        name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, make=make or (lambda: tensor)
    )


@pytest.fixture
def mixed():
    """Odd sizes and several dtypes: a layout that gets alignment wrong shows here."""
    return {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.randn(7),
        "c": torch.randn(1, 1).bfloat16(),
        "d": torch.randn(2, 3, 4).double(),
        "e": torch.randn(9).half(),
    }


@pytest.mark.parametrize("max_shard_bytes", [1, 64, 10**6])
def test_safetensors_reads_back_every_bit(max_shard_bytes, mixed, tmp_path):
    specs = [spec_of(name, tensor) for name, tensor in mixed.items()]
    written = write_shards(specs, tmp_path, max_shard_bytes=max_shard_bytes)
    read = {}
    for file in written.files:
        read |= load_file(tmp_path / file)
    assert read.keys() == mixed.keys()
    assert all(torch.equal(read[n], mixed[n]) and read[n].dtype == mixed[n].dtype for n in mixed)
    assert written.total_bytes == sum(t.numel() * t.element_size() for t in mixed.values())
    if len(written.files) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == written.total_bytes
        for name, file in index["weight_map"].items():
            assert name in load_file(tmp_path / file)
    else:
        assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_shards_keep_to_their_size_and_a_large_tensor_stands_alone():
    sizes = {"a": 10, "b": 10, "c": 10, "huge": 100, "d": 10}
    specs = [spec_of(name, torch.zeros(size)) for name, size in sizes.items()]
    shards = plan_shards(specs, max_shard_bytes=80)
    names = [[spec.name for spec in shard] for shard in shards]
    assert names == [["a", "b"], ["c"], ["huge"], ["d"]]


def test_a_shard_size_of_nothing_is_refused():
    with pytest.raises(UserError, match="must be positive"):
        plan_shards([spec_of("a", torch.zeros(1))], max_shard_bytes=0)


def test_one_tensor_at_a_time_is_alive(tmp_path):
    alive, most = 0, 0

    class Counted(torch.Tensor):
        def __del__(self):
            nonlocal alive
            alive -= 1

    def make():
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        return torch.zeros(1000).as_subclass(Counted)

    specs = [spec_of(str(i), torch.zeros(1000), make) for i in range(10)]
    write_shards(specs, tmp_path, max_shard_bytes=10**6)
    assert most <= 2


def test_a_disk_known_to_be_too_small_is_refused_before_writing(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 900, 100))
    with pytest.raises(UserError, match="needs 4,000 bytes, but 100 are free"):
        write_shards([spec_of("a", torch.zeros(1000))], tmp_path, max_shard_bytes=10**6)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_fills_up_is_reported_with_bytes_needed_and_free(tmp_path):
    def write_to_full_disk():
        with staging(tmp_path / "out") as folder:
            # A real ENOSPC: the weight file is a link to the device that is always full.
            (folder / "model.safetensors").symlink_to("/dev/full")
            write_shards([spec_of("a", torch.zeros(1000))], folder, max_shard_bytes=10**6)

    with pytest.raises(UserError, match=r"No space left.*4,000 bytes are needed and [\d,]+ bytes"):
        write_to_full_disk()
    assert list(tmp_path.iterdir()) == []


def test_a_file_size_limit_ends_an_export_cleanly(tiny_dense, tmp_path):
    program = """
import resource, sys
from pathlib import Path
import torch
from dotmoe.errors import UserError
from dotmoe.export import ExportConfig, export
from dotmoe.layout import ExpertLayout
from dotmoe.load import LoadConfig, load_dense
dense = load_dense(sys.argv[1], LoadConfig(device="cpu"))
widths = dense.widths
layout = ExpertLayout(
    expert_of_neuron_LN=(torch.arange(widths.ffn) % 12).repeat(widths.layers, 1),
    router_LED=torch.randn(widths.layers, 12, widths.model), active_experts=3)
tokens = torch.randint(2, 250, (2, 64))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    export(dense, layout, Path(sys.argv[2]), ExportConfig(), tokens)
except UserError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny_dense("llama")), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout
    assert "bytes are needed and" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_failure_mid_way_leaves_nothing(tmp_path):
    def fail():
        raise RuntimeError("planted")

    tensor = torch.zeros(1000)
    specs = [spec_of("a", tensor), spec_of("b", tensor, fail), spec_of("c", tensor)]
    with pytest.raises(RuntimeError, match="planted"), staging(tmp_path / "out") as folder:
        write_shards(specs, folder, max_shard_bytes=4000)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(tmp_path):
    def interrupted():
        with staging(tmp_path / "out") as folder:
            (folder / "half").write_text("")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_the_name_appears_only_at_the_end_and_old_leftovers_go(tmp_path):
    leftover = tmp_path / ".out.partial"
    leftover.mkdir()
    (leftover / "stale").write_text("from a killed process")
    (tmp_path / "out").mkdir()  # an empty folder may be taken over
    with staging(tmp_path / "out") as folder:
        (folder / "new").write_text("x")
        assert list((tmp_path / "out").iterdir()) == []
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["new"]


def test_a_damaged_dense_file_is_a_clear_error(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("llama")
    shutil.copytree(dense.folder, tmp_path / "dense")
    whole = (tmp_path / "dense/model.safetensors").read_bytes()
    (tmp_path / "dense/model.safetensors").write_bytes(whole[: len(whole) // 2])
    object.__setattr__(dense, "folder", tmp_path / "dense")
    with pytest.raises(UserError, match="no whole safetensors file"):
        export(dense, layout_of(dense), tmp_path / "out", ExportConfig(), tokens_BT)
    assert [p.name for p in tmp_path.iterdir()] == ["dense"]
