"""What the training loop runs: gradients of the student's losses over one batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dotmoe.artifacts import DenseModel
from dotmoe.data import TokenBlocks
from dotmoe.distributed import num_ranks, rank, sum_over_ranks, whole
from dotmoe.finetune.config import FinetuneConfig
from dotmoe.finetune.student import Student, Taught, hidden_states
from dotmoe.training.loop import Metrics
from dotmoe.training.optimizer import ParameterGroup

ROUTER = ".router."
"""In the name of each router's parameter."""


class Finetuning:
    """Next-token cross-entropy, distillation if wanted, and the losses of the routers."""

    def __init__(
        self,
        student: Student,
        teacher: DenseModel | None,
        blocks: TokenBlocks,
        config: FinetuneConfig,
        *,
        seed: int,
    ) -> None:
        """Bind model and text.

        Args:
            student: The model to train, sharded or whole.
            teacher: A dense model of its own, frozen; None: there is no distillation, or the
                student's own weights are frozen and serve.
            blocks: Training text.
            config: See `FinetuneConfig`.
            seed: Of the data order.
        """
        self.student = student
        self.teacher = teacher
        self.blocks = blocks
        self.config = config
        self.seed = seed
        self.micro_batch_size = config.micro_batch_size

    def parameter_groups(self) -> Sequence[ParameterGroup]:
        """Routers, and the other weights that are trained, if any."""
        config, trained = self.config, self.student.trained()
        router_lr = config.lr if config.lr_router is None else config.lr_router
        routers = {name: p for name, p in trained.items() if ROUTER in name}
        weights = {name: p for name, p in trained.items() if ROUTER not in name}
        groups = [ParameterGroup(name="router", parameters=routers, lr=router_lr)]
        if weights:
            groups.append(ParameterGroup(name="weights", parameters=weights, lr=config.lr))
        return groups

    def accumulate_gradients(self, step: int) -> Metrics:
        """Gradient over the batch of all ranks, each of which runs its part of it."""
        size, ranks = self.config.batch_size, num_ranks()
        batch = self.blocks.batch(step, size, self.seed, rank(), ranks)
        batch = batch.to(self.student.dense.device)
        sums: dict[str, Tensor] = {}
        for rows in torch.split(batch, self.micro_batch_size):
            share = len(rows) / size
            for name, value in self._backward(rows, share).items():
                sums[name] = sums[name] + share * value if name in sums else share * value
        if not self.student.is_sharded:
            for parameter in self.student.trained().values():
                if parameter.grad is not None:
                    sum_over_ranks(parameter.grad)
        values = sum_over_ranks(torch.stack([value.float() for value in sums.values()]))
        return dict(zip(sums, values.tolist(), strict=True))

    def state(self) -> dict[str, Any]:
        """Nothing: a step is a function of the parameters and its number."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Inverse of `state`; also forgets a step that was cut off."""
        self.student.routing.enabled = True
        self.student.routing.z_losses = self.student.routing.balance_losses = None

    def halve_micro_batch(self) -> int | None:
        """Take half as many sequences a forward pass; None where one is all there is.

        Load balancing counts tokens a micro-batch, so that loss changes a little.
        """
        in_use = min(self.micro_batch_size, self.config.batch_size)
        if in_use == 1:
            return None
        self.micro_batch_size = in_use // 2
        return self.micro_batch_size

    def _backward(self, rows_BT: Tensor, share: float) -> dict[str, Tensor]:
        """Backward of one micro-batch, weighted by its share of the batch."""
        config, student = self.config, self.student
        losses = student(rows_BT, self._taught(rows_BT), config)
        z, balance = student.routing.take_losses()
        total = losses.total + config.z_loss_weight * z + config.balance_weight * balance
        # FSDP averages gradients over the ranks, where the parts of a batch are to be added up.
        torch.autograd.backward(total * (share * num_ranks() if student.is_sharded else share))
        parts = {"loss": total, "ce": losses.ce, "z": z, "balance": balance}
        if config.kl_weight > 0:
            parts["kl"] = losses.kl
        return {name: value.detach() for name, value in parts.items()}

    @torch.no_grad()
    def _taught(self, rows_BT: Tensor) -> Taught | None:
        if self.teacher is None:
            return None
        head_VD = whole(self.teacher.family.head(self.teacher.model).weight)
        return Taught(hidden_states(self.teacher, rows_BT), head_VD)
