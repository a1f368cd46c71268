"""STAGE finetune: recovery training of the converted model, with only the chosen experts run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor

from dotmoe.checkpoint.tensors import Tensors
from dotmoe.data import TokenBlocks
from dotmoe.distributed import (
    fsdp_mesh,
    full_tensor,
    is_rank_zero,
    num_ranks,
    raise_on_all_ranks,
    resolved_device,
)
from dotmoe.finetuning.student import LAYOUT, MODEL, Student, write_student
from dotmoe.layout import ExpertLayout
from dotmoe.load import LoadConfig, load_dense, resolved_dtype
from dotmoe.models.dense import DenseModel
from dotmoe.moe.masked import recomputing
from dotmoe.moe.objective import (
    Objective,
    ObjectiveConfig,
    Taught,
    hidden_states,
    require_trainable,
)
from dotmoe.options import above, at_least, between
from dotmoe.parameters import meta_model
from dotmoe.sharded_weights import is_sharded
from dotmoe.training.folder import OnStep
from dotmoe.training.loop import DEFAULT_TRAINING, ParameterGroup, TrainingConfig, train

__all__ = ["LAYOUT", "MODEL", "FinetuneConfig", "Finetuning", "divides_training", "finetune"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneConfig(ObjectiveConfig):
    """Recovery training. Defaults are the paper's (tab:hyperparams_sft) unless said."""

    train: Literal["everything", "router", "lora", "repair"] = "everything"
    """everything: all weights and the routers; router: the routers alone; lora: low-rank adapters
    on experts and attention, and the routers (needs `pip install -e '.[lora]'`); repair: the
    FFNs layer by layer to the dense model's stream; it reads none of the options of a training."""
    steps: Annotated[int, at_least(1)] = 4578
    """Optimizer steps. 4578 of 128 x 2048 tokens are the paper's 1.2B tokens."""
    batch_size: Annotated[int, at_least(1)] = 128
    lr: Annotated[float, above(0)] = 5e-5
    weight_decay: Annotated[float, at_least(0)] = 1e-4
    """AdamW weight decay; the paper names it for alignment only."""
    warmup_ratio: Annotated[float, between(0, 1)] = 0.1
    kl_weight: Annotated[float, at_least(0)] = 0.0
    """Weight of KL(dense || MoE): distillation from the dense model; 0: none, as in the paper.
    With `train everything` it needs a second copy of the model."""
    z_loss_weight: Annotated[float, at_least(0)] = 0.0
    balance_weight: Annotated[float, at_least(0)] = 1e-4
    lora_rank: Annotated[int, at_least(1)] = 16
    """Rank of each adapter; an expert has one for each of its three projections."""
    lora_alpha: Annotated[int, above(0)] = 32
    """Adapters are multiplied by alpha / rank."""


class Finetuning(Objective):
    """The sparse model as a student of the text, and of the dense model if that is wanted.

    Where its weights are frozen the model is its own teacher: with all experts on, without routers
    and adapters. Else `teacher` is a second copy, or None.
    """

    config: FinetuneConfig

    def __init__(
        self,
        student: Student,
        teacher: DenseModel | None,
        blocks: TokenBlocks,
        config: FinetuneConfig,
        *,
        seed: int,
    ) -> None:
        super().__init__(student.dense, [student.routing], blocks, config, seed=seed)
        self.model = student
        self.own_teacher = teacher

    def parameter_groups(self) -> Sequence[ParameterGroup]:
        """Routers, and the other weights that are trained, if any."""
        trained = self.model.trained()
        routers = {name: p for name, p in trained.items() if ".router." in name}
        weights = {name: p for name, p in trained.items() if name not in routers}
        groups = [ParameterGroup(parameters=routers, lr=self.config.router_rate)]
        if weights:
            groups.append(ParameterGroup(parameters=weights, lr=self.config.lr))
        return groups

    def teacher(self, tokens_BT: Tensor) -> Taught | None:
        """What a second copy of the dense model says."""
        if self.own_teacher is None:
            return None
        with torch.no_grad():
            head_VD = full_tensor(self.own_teacher.family.head(self.own_teacher.model).weight)
            return hidden_states(self.own_teacher, tokens_BT), head_VD

    def losses(self, tokens_BT: Tensor, taught: Taught | None) -> dict[str, Tensor]:
        """All of it is one call of the student, so that FSDP gathers embedding and head once."""

        def forward() -> dict[str, Tensor]:
            itself = taught
            if taught is None and self.config.kl_weight:
                with self.model.without_adapters():
                    itself = super(Finetuning, self).teacher(tokens_BT)
            return super(Finetuning, self).losses(tokens_BT, itself)

        losses: dict[str, Tensor] = self.model(forward)
        return losses

    def differentiate(self, loss: Tensor, *, is_last: bool) -> None:
        """See `Objective`; replicas add up their gradients after the last micro-batch alone."""
        self.model.set_requires_all_reduce(is_last)
        super().differentiate(loss, is_last=is_last)


def divides_training(dense: DenseModel, config: FinetuneConfig, load: LoadConfig) -> bool:
    """Whether several ranks would divide what is trained.

    Weights, gradients and two moments in float32 are 16 bytes for each that is trained.
    """
    num_weights = sum(p.numel() for p in dense.model.parameters())
    dtype = Tensors.of(dense).dtype
    num_bytes = 16 if config.train == "everything" else dtype.itemsize
    return is_sharded(load.sharding, num_bytes * num_weights, resolved_device(load.device))


def finetune(
    dense: DenseModel,
    layout: ExpertLayout,
    blocks: TokenBlocks,
    config: FinetuneConfig,
    *,
    folder: Path,
    seed: int,
    load: LoadConfig,
    origin: DenseModel | None = None,
    training: TrainingConfig = DEFAULT_TRAINING,
    on_step: OnStep = lambda step, metrics: None,
) -> ExpertLayout:
    """Train the MoE that the layout makes of a dense model; all ranks together.

    Since the experts partition the neurons, the result is a dense checkpoint with other weights,
    in the original order of the neurons and in the dtype of its source, and a layout.

    Args:
        dense: The dense model, described: weights are read from its files.
        layout: Experts, routers and k.
        blocks: Training text.
        config: See `FinetuneConfig`.
        folder: Receives `model/`, `layout.safetensors`, and what `train` writes.
        seed: Of the data order, and of adapters.
        load: Device, dtype to compute in, and whether ranks divide the weights.
        origin: The dense model to learn from, where `dense` is a repaired one; None: `dense`.
        training: See `train`.
        on_step: Called after each step with its number and metrics.

    Returns:
        The same experts with trained routers.

    Raises:
        UserError: See `train`; or the dtype to compute in is float16.
    """
    device = resolved_device(load.device)
    dtype = resolved_dtype(load.dtype, device)
    if dtype == "auto":
        dtype = Tensors.of(dense).dtype
    raise_on_all_ranks(lambda: require_trainable(config, dtype))
    shard = num_ranks() > 1 and divides_training(dense, config, load)
    teacher = None
    if config.kl_weight > 0 and (config.train == "everything" or origin is not None):
        sharding: Literal["shard", "replicate"] = "shard" if shard else "replicate"
        teacher = load_dense((origin or dense).source, replace(load, sharding=sharding))
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    with fsdp_mesh(device, shard=shard) as ranks:
        described = replace(dense, model=meta_model(dense.config, dtype))
        student = raise_on_all_ranks(lambda: Student(described, layout, config, ranks, seed=seed))
        task = Finetuning(student, teacher, blocks, config, seed=seed)
        with recomputing(student.dense, config.activation_checkpointing):
            train(task, config.schedule(blocks.num_blocks), folder, training, on_step)
        trained = write_student(student, layout, folder / MODEL)
    if is_rank_zero():
        trained.save(folder / LAYOUT)
    return trained
