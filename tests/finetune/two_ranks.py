"""Run by torchrun: the stage with weights replicated, then sharded; or what reading them takes."""

import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from dotmoe.data import TokenBlocks
from dotmoe.distributed import fsdp_mesh, num_ranks, process_group, rank
from dotmoe.finetuning import FinetuneConfig, finetune
from dotmoe.finetuning.student import Student
from dotmoe.layout import ExpertLayout
from dotmoe.load import LoadConfig, describe_dense, load_dense
from dotmoe.sharded_weights import unloaded

CPU = torch.device("cpu")
CONFIG = FinetuneConfig(
    steps=4, batch_size=4, micro_batch_size=1, lr=1e-3, max_epochs=10, kl_weight=0.5
)


def torchrun(*arguments):
    """Run a script or `-m module` on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += map(str, arguments)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]


def unloaded_dense(model, dtype):
    """A dense model without weights."""
    dense = describe_dense(model)
    return replace(dense, model=unloaded(dense.config, dtype))


def both_ways(model, folder, train, dtype):
    """Training of replicated, then of sharded weights."""
    for sharding in ("replicate", "shard"):
        out = folder / f"{sharding}-{dtype}"
        out.mkdir(exist_ok=True)
        finetune(
            describe_dense(model),
            ExpertLayout.load(folder / "start.safetensors"),
            TokenBlocks.load(folder / "blocks.safetensors"),
            replace(CONFIG, train=train),
            folder=out,
            seed=0,
            load=LoadConfig(device="cpu", dtype=dtype, sharding=sharding),
        )


def peak(model, folder):
    """Bytes by which resident memory has grown at its peak while a student was read."""
    seen = {}
    read("embedded", "shard")  # libraries are loaded now, and little memory is left to be used
    for sharding in ("shard", "whole"):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = resident_bytes("VmRSS")
        read(model, sharding)
        seen[sharding] = resident_bytes("VmHWM") - before
    torch.save(seen, folder / f"peak.{rank()}.pt")


def read(model, sharding):
    if sharding == "whole":
        load_dense(model, LoadConfig(sharding="replicate"))
        return
    dense = unloaded_dense(model, torch.float32)
    widths = dense.widths
    layout = ExpertLayout(
        expert_of_neuron_LN=torch.randperm(widths.ffn).remainder(16).repeat(widths.layers, 1),
        router_LED=torch.zeros(widths.layers, 16, widths.model),
        active_experts=2,
    )
    with fsdp_mesh(CPU, shard=True) as ranks:
        Student(dense, layout, FinetuneConfig(), ranks, seed=0)


def resident_bytes(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(kind))


if __name__ == "__main__":
    what, model, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    with process_group(CPU):
        assert num_ranks() == 2
        if what == "peak":
            peak(model, folder)
        else:
            for dtype in sys.argv[4:]:
                both_ways(model, folder, what, dtype)
