"""The stage on two ranks, with weights replicated, then sharded."""

from dataclasses import replace
from itertools import product

import torch

from dotmoe.common.distributed import num_ranks, process_group
from dotmoe.method.config import FinetuneConfig
from dotmoe.method.finetuning import finetune
from dotmoe.method.layout import LAYOUT, ExpertLayout
from dotmoe.models.config import LoadConfig
from dotmoe.models.load import describe_dense
from dotmoe.models.meta_model import meta_model
from dotmoe.text.blocks import TokenBlocks

CONFIG = FinetuneConfig(
    steps=2, batch_size=4, micro_batch_size=1, lr=1e-3, max_epochs=10, kl_weight=0.5
)


def unloaded_dense(model, dtype):
    """A dense model without weights."""
    dense = describe_dense(model)
    return replace(dense, model=meta_model(dense.config, dtype), weights="meta")


def both_ways(model, folder, train, dtypes):
    """Training of replicated, then of sharded weights, in each dtype; on all ranks."""
    with process_group(torch.device("cpu")):
        assert num_ranks() == 2
        for dtype, sharding in product(dtypes, ("replicate", "shard")):
            out = folder / f"{sharding}-{dtype}"
            out.mkdir(exist_ok=True)
            finetune(
                describe_dense(str(model)),
                ExpertLayout.load(folder / LAYOUT),
                TokenBlocks.load(folder / "blocks.safetensors"),
                replace(CONFIG, train=train, steps=2 if dtype == "float32" else 1),
                folder=out,
                seed=0,
                load=LoadConfig(device="cpu", dtype=dtype, sharding=sharding),
            )
