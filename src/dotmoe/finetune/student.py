"""The model that is trained: the dense one with experts of its own, and its losses."""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dotmoe.artifacts import DenseModel
from dotmoe.finetune.config import FinetuneConfig
from dotmoe.finetune.lora import Adapters, add_adapters
from dotmoe.layout import ExpertLayout
from dotmoe.moe.distillation import DistillationLoss, distillation_loss, next_token_labels
from dotmoe.moe.sparse_ffn import Routing, SparseFFN, make_sparse


class Taught(NamedTuple):
    """What a teacher says of a text."""

    hidden_TD: Tensor
    """Its final hidden states."""
    head_VD: Tensor | None
    """What turns them into logits; None: the student's head."""


class Student(nn.Module):
    """A dense model whose split FFNs are experts, with what of it is trained set to want gradients.

    Weights that are trained are float32. If the model was loaded in another dtype, that is the one
    it computes in: at the paper's rate most updates of a 16-bit weight would be rounded away.
    """

    def __init__(
        self, dense: DenseModel, layout: ExpertLayout, config: FinetuneConfig, *, seed: int
    ) -> None:
        super().__init__()
        self.dtype = next(dense.model.parameters()).dtype
        self.routing = Routing(
            active_experts=layout.active_experts,
            surrogate=config.surrogate,
            surrogate_temperature=config.surrogate_temperature,
            unchosen=config.unchosen,
        )
        self._dense = (dense,)  # in a tuple: its model is registered below
        self.model = dense.model
        self.ffns: tuple[SparseFFN, ...] = tuple(make_sparse(dense, layout, self.routing))
        self.adapters: Adapters | None = None
        self.is_sharded = False
        self.model.requires_grad_(False)
        if config.train == "lora":
            self.adapters = add_adapters(dense, config, seed)
        if config.train == "everything":
            self.model.requires_grad_(True).float()
        for ffn in self.ffns:
            ffn.router.requires_grad_(True)

    @property
    def dense(self) -> DenseModel:
        """What the student was made of; its `model` is the student's."""
        return self._dense[0]

    def trained(self) -> dict[str, nn.Parameter]:
        """Parameters that are trained, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def shard(self, mesh: DeviceMesh) -> None:
        """Divide all weights over the ranks by FSDP2; a layer is whole only while it runs.

        Routers have a group of their own, which stays float32 while the rest computes in the
        model's dtype.
        """
        full = MixedPrecisionPolicy()
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        if self.dtype == torch.float32:
            policy = full
        for ffn in self.ffns:
            fully_shard(ffn.router, mesh=mesh, mp_policy=full)
        for layer in self.dense.family.layers(self.model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self, mesh=mesh, mp_policy=policy)
        self.is_sharded = True

    def forward(
        self, tokens_BT: Tensor, taught: Taught | None, config: FinetuneConfig
    ) -> DistillationLoss:
        """Losses of the model's predictions; those of its routers stay in `routing`.

        All of it is one forward pass, so that FSDP gathers embedding and head once.

        Args:
            tokens_BT: Text.
            taught: What a teacher of its own says of it; None: there is none, and if there is
                distillation, the frozen weights of the student are the teacher.
            config: Weights of the losses.
        """
        with self.computing():
            if taught is None and config.kl_weight > 0:
                taught = Taught(self._hidden_as_dense(tokens_BT), None)
            self.routing.want_losses()
            return distillation_loss(
                hidden_states(self.dense, tokens_BT),
                None if taught is None else taught.hidden_TD,
                self.dense.family.head(self.model).weight,
                next_token_labels(tokens_BT),
                kl_weight=0.0 if taught is None else config.kl_weight,
                ce_weight=config.ce_weight,
                teacher_head_VD=None if taught is None else taught.head_VD,
            )

    @torch.no_grad()
    def _hidden_as_dense(self, tokens_BT: Tensor) -> Tensor:
        """Final hidden states of the dense model, which the frozen weights are: [T, D]."""
        self.routing.enabled = False
        with nullcontext() if self.adapters is None else self.adapters.disabled():
            hidden_TD = hidden_states(self.dense, tokens_BT)
        self.routing.enabled = True
        return hidden_TD

    def computing(self) -> AbstractContextManager[object]:
        """Inside, products of float32 weights are computed in the dtype the model was loaded in."""
        if self.is_sharded or self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(next(self.model.parameters()).device.type, dtype=self.dtype)


def hidden_states(dense: DenseModel, tokens_BT: Tensor) -> Tensor:
    """What the head's matrix turns into logits, [T, D]."""
    trunk = dense.family.trunk(dense.model)
    hidden: Tensor = trunk(input_ids=tokens_BT, use_cache=False).last_hidden_state
    multipliers = dense.family.traits(dense.config).multipliers
    return hidden.reshape(-1, hidden.shape[-1]) / multipliers.logits_divisor
