"""Safetensors files written tensor by tensor. Oracle: the safetensors library."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from dotmoe.common.errors import UserError
from dotmoe.export.format import TensorSpec
from dotmoe.export.transformers_format import write_checkpoint


def spec_of(name, tensor):
    return TensorSpec.of(name, tensor, tensor.dtype)


@pytest.mark.parametrize("max_bytes", [1, 64, 10**6])
def test_safetensors_reads_back_every_bit(max_bytes, tmp_path):
    # Odd sizes and several dtypes: a layout that gets alignment wrong shows here.
    mixed = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.randn(7),
        "c": torch.randn(1, 1).bfloat16(),
        "d": torch.randn(2, 3, 4).double(),
        "e": torch.randn(9).half(),
    }
    specs = [spec_of(name, tensor) for name, tensor in mixed.items()]
    files = write_checkpoint(specs, tmp_path, max_bytes)
    read = {name: tensor for file in files for name, tensor in load_file(tmp_path / file).items()}
    assert read.keys() == mixed.keys()
    assert all(torch.equal(read[n], mixed[n]) and read[n].dtype == mixed[n].dtype for n in mixed)
    index = tmp_path / "model.safetensors.index.json"
    assert (files == ["model.safetensors"]) == (not index.exists())
    if index.exists():
        written = json.loads(index.read_text())
        assert written["metadata"]["total_size"] == sum(t.nbytes for t in mixed.values())
        assert all(n in load_file(tmp_path / file) for n, file in written["weight_map"].items())


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

    specs = [replace(spec_of(str(i), torch.zeros(1000)), make=make) for i in range(10)]
    write_checkpoint(specs, tmp_path, 10**6)
    assert most <= 2


def test_a_disk_known_to_be_too_small_is_refused_before_writing(tmp_path):
    huge = replace(spec_of("a", torch.zeros(1)), shape=(2**60,))
    with pytest.raises(UserError, match=r"4,611,686,018,427,387,904 bytes are needed"):
        write_checkpoint([huge], tmp_path, 10**6)
    assert list(tmp_path.iterdir()) == []
