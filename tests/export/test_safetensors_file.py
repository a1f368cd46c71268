"""Weights divided into files. Oracle: the safetensors library."""

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
    first, second = torch.randn(10).split([7, 3])  # slices of one matrix, as experts are
    mixed = {"a": torch.randn(3, 5).bfloat16(), "b": first, "c": second, "d": first.half()}
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


def test_a_disk_known_to_be_too_small_is_refused_before_writing(tmp_path):
    huge = replace(spec_of("a", torch.zeros(1)), shape=(2**60,))
    with pytest.raises(UserError, match=r"4,611,686,018,427,387,904 bytes are needed"):
        write_checkpoint([huge], tmp_path, 10**6)
    assert list(tmp_path.iterdir()) == []
