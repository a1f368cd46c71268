"""STAGE finetune: recovery training of the converted model, with only the chosen experts run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dotmoe.data import TokenBlocks
from dotmoe.distributed import (
    fsdp_mesh,
    full_tensor,
    is_rank_zero,
    num_ranks,
    raise_on_all_ranks,
    resolved_device,
)
from dotmoe.finetuning.student import Student, write_student
from dotmoe.layout import ExpertLayout
from dotmoe.load import LoadConfig, load_dense, resolved_dtype
from dotmoe.models.dense import DenseModel
from dotmoe.moe.losses import DistillationLoss
from dotmoe.moe.objective import (
    Objective,
    ObjectiveConfig,
    Taught,
    hidden_states,
    require_trainable,
)
from dotmoe.moe.units import recomputing
from dotmoe.options import above, at_least, between
from dotmoe.sharded_weights import checkpoint_dtype, is_sharded, unloaded
from dotmoe.training.loop import DEFAULT_TRAINING, OnStep, ParameterGroup, TrainingConfig, train

MODEL, LAYOUT = "model", "layout.safetensors"
"""What is written into the stage's folder."""

ROUTER = ".router."
"""In the name of each router's parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneConfig(ObjectiveConfig):
    """Recovery training. Defaults are the paper's (tab:hyperparams_sft) unless said."""

    train: Literal["everything", "router", "lora"] = "everything"
    """everything: all weights and the routers; router: the routers alone; lora: low-rank adapters
    on experts and attention, and the routers (needs `pip install 'dotmoe[lora]'`)."""
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

    @property
    def has_own_teacher(self) -> bool:
        """Whether distillation needs a second copy of the model.

        Where its weights are frozen the model is its own teacher: with all experts on, without
        routers and adapters.
        """
        return self.kl_weight > 0 and self.train == "everything"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finetuned:
    """What finetuning leaves behind."""

    layout: ExpertLayout
    """The same experts with trained routers."""
    model_folder: Path
    """A dense checkpoint with the trained weights."""


class Finetuning(Objective):
    """The sparse model as a student of the text, and of the dense model if that is wanted."""

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
        super().__init__(student.dense, student.routing, blocks, config, seed=seed)
        self.model = student
        self.own_teacher = teacher

    def parameter_groups(self) -> Sequence[ParameterGroup]:
        """Routers, and the other weights that are trained, if any."""
        trained = self.model.trained()
        routers = {name: p for name, p in trained.items() if ROUTER in name}
        weights = {name: p for name, p in trained.items() if ROUTER not in name}
        rate = self.config.router_rate
        groups = [ParameterGroup(name="router", parameters=routers, lr=rate)]
        if weights:
            groups.append(ParameterGroup(name="weights", parameters=weights, lr=self.config.lr))
        return groups

    def teacher(self, tokens_BT: Tensor) -> Taught | None:
        """What the dense model says, from its own copy or from the student's frozen weights."""
        if self.own_teacher is None:
            return None
        with torch.no_grad():
            head_VD = full_tensor(self.own_teacher.family.head(self.own_teacher.model).weight)
            return Taught(hidden_states(self.own_teacher, tokens_BT), head_VD)

    def student(self, tokens_BT: Tensor, taught: Taught | None) -> DistillationLoss:
        """All of it is one call of the student, so that FSDP gathers embedding and head once."""

        def forward() -> DistillationLoss:
            if taught is not None or not self.config.kl_weight:
                return super(Finetuning, self).student(tokens_BT, taught)
            with self.model.without_adapters():
                itself = super(Finetuning, self).teacher(tokens_BT)
            return super(Finetuning, self).student(tokens_BT, itself)

        loss: DistillationLoss = self.model(forward)
        return loss

    def differentiate(self, loss: Tensor, *, is_last: bool) -> None:
        """See `Objective`; replicas add up their gradients after the last micro-batch alone."""
        self.model.set_requires_all_reduce(is_last)
        super().differentiate(loss, is_last=is_last)


def divides_training(dense: DenseModel, config: FinetuneConfig, load: LoadConfig) -> bool:
    """Whether several ranks would divide what is trained.

    Weights, gradients and two moments in float32 are 16 bytes for each that is trained.
    """
    num_weights = sum(p.numel() for p in dense.model.parameters())
    dtype = checkpoint_dtype(dense.config, dense.folder)
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
    training: TrainingConfig = DEFAULT_TRAINING,
    on_step: OnStep = lambda step, metrics: None,
) -> Finetuned:
    """Train the MoE that the layout makes of a dense model; all ranks together.

    Since the experts partition the neurons, the result is a dense checkpoint with other weights,
    in the original order of the neurons and in the dtype of its source, and a layout.

    Args:
        dense: The dense model, described: weights are read from its files.
        layout: Experts, routers and k.
        blocks: Training text.
        config: See `FinetuneConfig`.
        folder: Receives `model/`, `layout.safetensors`, `metrics.jsonl` and `checkpoints/`, from
            which a run goes on.
        seed: Of the data order, and of adapters.
        load: Device, dtype to compute in, and whether ranks divide the weights.
        training: How often to save, what to do with bad values, and where to log.
        on_step: Called after each step with its number and metrics.

    Raises:
        UserError: See `train`; or the dtype to compute in is float16.
    """
    device = resolved_device(load.device)
    dtype = resolved_dtype(load.dtype, device)
    if dtype == "auto":
        dtype = checkpoint_dtype(dense.config, dense.folder)
    raise_on_all_ranks(lambda: require_trainable(config, dtype))
    shard = num_ranks() > 1 and divides_training(dense, config, load)
    teacher = None
    if config.has_own_teacher:
        sharding = replace(load, sharding="shard" if shard else "replicate")
        teacher = load_dense(dense.source, sharding)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)

    def student_over(ranks: DeviceMesh) -> Student:
        described = replace(dense, model=unloaded(dense.config, dtype))
        return Student(described, layout, config, ranks, seed=seed)

    with fsdp_mesh(device, shard=shard) as ranks:
        student = raise_on_all_ranks(lambda: student_over(ranks))
        task = Finetuning(student, teacher, blocks, config, seed=seed)
        with recomputing(student.dense, config.activation_checkpointing):
            train(task, config.schedule(blocks.num_blocks), folder, training, on_step)
        trained = write_student(student, layout, folder / MODEL)
    if is_rank_zero():
        trained.save(folder / LAYOUT)
    return Finetuned(layout=trained, model_folder=folder / MODEL)
