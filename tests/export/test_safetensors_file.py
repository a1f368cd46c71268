"""Safetensors files written tensor by tensor. Oracle: the safetensors library."""

import json
import math
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from dotmoe.errors import UserError
from dotmoe.export import FORMATS
from dotmoe.export.format import STORED, Conversion, TensorSpec
from dotmoe.export.safetensors_file import write_checkpoint
from dotmoe.files import complete_folder
from dotmoe.layout import ExpertLayout
from dotmoe.models.dense import DenseModel
from dotmoe.models.family import FAMILIES
from dotmoe.parameters import meta_model

SOURCE = Path(__file__).parents[2] / "src"


def spec_of(name, tensor, make=None):
    return TensorSpec(
        name=name,
        shape=tuple(tensor.shape),
        stored=STORED[tensor.dtype],
        make=make or (lambda: tensor),
    )


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


def test_a_shard_keeps_to_its_size_and_must_have_one(tmp_path):
    sizes = {"a": 10, "b": 10, "c": 10, "huge": 100, "d": 10}
    specs = [spec_of(name, torch.zeros(size)) for name, size in sizes.items()]
    files = write_checkpoint(specs, tmp_path, 80)
    held = [set(load_file(tmp_path / file)) for file in files]
    assert {"huge"} in held
    assert all(sum(sizes[name] for name in names) <= 20 for names in held if names != {"huge"})
    with pytest.raises(UserError, match="must be positive"):
        write_checkpoint(specs, tmp_path, 0)


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
    write_checkpoint(specs, tmp_path, 10**6)
    assert most <= 2


def test_a_disk_known_to_be_too_small_is_refused_before_writing(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 900, 100))
    with pytest.raises(UserError, match="4,000 bytes are needed, but 100 are free"):
        write_checkpoint([spec_of("a", torch.zeros(1000))], tmp_path, 10**6)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_fills_up_is_reported_with_bytes_needed_and_free(tmp_path):
    def write_to_full_disk():
        with complete_folder(tmp_path / "out") as folder:
            # A real ENOSPC: the weight file is a link to the device that is always full.
            (folder / "model.safetensors").symlink_to("/dev/full")
            write_checkpoint([spec_of("a", torch.zeros(1000))], folder, 10**6)

    with pytest.raises(UserError, match=r"No space left.*4,000 bytes are needed and [\d,]+ bytes"):
        write_to_full_disk()
    assert list(tmp_path.iterdir()) == []


FILE_SIZE_LIMIT = """
import resource, sys
from pathlib import Path
import torch
from dotmoe.errors import UserError
from dotmoe.export import ExportConfig, export
from dotmoe.layout import ExpertLayout
from dotmoe.load import describe_dense
dense = describe_dense(sys.argv[1])
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


def test_a_file_size_limit_ends_an_export_cleanly(tiny_dense, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FILE_SIZE_LIMIT, str(tiny_dense("llama")), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout
    assert "bytes are needed and" in done.stdout
    assert list(tmp_path.iterdir()) == []


# --- what an export of 7B would read and write ------------------------------------------------


class SizesOnly:
    """Stands in for the files of a checkpoint: shapes from the meta device, and what is read."""

    folder = "nowhere"

    def __init__(self, model):
        self._shape_of = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.names = set(self._shape_of)
        self.was_read = []

    def stored_name(self, name):
        return name

    def describe(self, name):
        return self._shape_of[name], torch.bfloat16

    def read(self, name):
        self.was_read.append(name)
        return torch.zeros((), dtype=torch.bfloat16).expand(self._shape_of[name])


@pytest.fixture(scope="module")
def qwen_7b():
    """A conversion of Qwen2.5-7B to glm4_moe without weights, and its tensors."""
    config = AutoConfig.for_model(
        "qwen2",
        tie_word_embeddings=False,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152_064,
    )
    model = meta_model(config)
    dense = DenseModel(
        model=model,
        tokenizer=None,
        family=FAMILIES["qwen2"],
        folder=None,
        source="Qwen2.5-7B",
        revision=None,
    )
    conversion = Conversion(
        dense=dense,
        tensors=SizesOnly(model),
        layout=ExpertLayout(
            expert_of_neuron_LN=torch.arange(148).repeat(28, 128),
            router_LED=torch.zeros(28, 148, 3584),
            active_experts=37,
        ),
        exponents=dict.fromkeys(range(28), 12),
        dtype=torch.bfloat16,
    )
    specs = list(FORMATS["glm4_moe"].tensors(conversion))
    return SimpleNamespace(config=config, tensors=conversion.tensors, specs=specs)


def test_a_7b_export_has_the_bytes_of_the_model_and_what_is_added(qwen_7b):
    zero_expert, router, bias = 3 * 3584 * 128, 148 * 3584, 148
    expected = 2 * 7_615_616_512 + 28 * (2 * (router + zero_expert) + 4 * bias)
    assert sum(spec.num_bytes for spec in qwen_7b.specs) == expected
    assert math.ceil(expected / (4 * 2**30)) == 4
    # Never more than one dense tensor is made.
    assert max(spec.num_bytes for spec in qwen_7b.specs) == 152_064 * 3584 * 2
