"""Run by torchrun: the stage with weights replicated, then sharded."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from dotmoe.data import TokenBlocks
from dotmoe.distributed import joined, mesh, num_ranks
from dotmoe.finetune import FinetuneConfig, Start, finetune
from dotmoe.layout import ExpertLayout
from dotmoe.load import LoadConfig, load_dense

CONFIG = FinetuneConfig(
    steps=4, batch_size=4, micro_batch_size=2, lr=1e-3, max_epochs=10, kl_weight=0.5
)

if __name__ == "__main__":
    model, folder, train = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    config = replace(CONFIG, train=train)
    with joined(torch.device("cpu")):
        assert num_ranks() == 2
        for sharding in ("replicate", "shard"):
            out = folder / sharding
            out.mkdir(exist_ok=True)
            dense = load_dense(model, LoadConfig(sharding="replicate"))
            teacher = None
            if train == "everything":
                teacher = load_dense(model, LoadConfig(sharding=sharding))
            finetune(
                Start(
                    dense=dense,
                    layout=ExpertLayout.load(folder / "start.safetensors"),
                    teacher=teacher,
                ),
                TokenBlocks.load(folder / "blocks.safetensors"),
                config,
                folder=out,
                seed=0,
                router_dtype=torch.float32,
                sharded_over=mesh(torch.device("cpu")) if sharding == "shard" else None,
            )
