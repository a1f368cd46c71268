"""What is trained, how long and how hard."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from dotmoe.errors import UserError
from dotmoe.moe.router import Surrogate
from dotmoe.moe.sparse_ffn import Unchosen
from dotmoe.options import HOW

Train = Literal["everything", "router", "lora"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneConfig:
    """Recovery training. Defaults are the paper's (tab:hyperparams_sft) unless said."""

    train: Train = "everything"
    """everything: all weights and the routers; router: the routers alone; lora: low-rank adapters
    on experts and attention, and the routers (needs `pip install 'dotmoe[lora]'`)."""
    steps: int = 4578
    """Optimizer steps. 4578 of 128 x 2048 tokens are the paper's 1.2B tokens."""
    batch_size: int = 128
    """Sequences per optimizer step, of all ranks together."""
    micro_batch_size: Annotated[int, HOW] = 4
    """Sequences per forward pass; gradients add up to the batch. Changes memory, and of the losses
    load balancing alone, which counts the tokens of a micro-batch."""
    max_epochs: float = 4.0
    """Passes over the data at most; fewer steps are taken where the data would be repeated more."""
    lr: float = 5e-5
    """Peak learning rate, for whatever has no rate of its own."""
    lr_router: float | None = None
    """Peak learning rate of the routers; default: lr."""
    weight_decay: float = 1e-4
    """AdamW weight decay; the paper names it for alignment only."""
    warmup_ratio: float = 0.1
    """Share of the steps in which the rate rises linearly; then it falls as a cosine."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    kl_weight: float = 0.0
    """Weight of KL(dense || MoE): distillation from the dense model; 0: none, as in the paper.
    With `train everything` it needs a second copy of the model."""
    ce_weight: float = 1.0
    """Weight of next-token cross-entropy."""
    balance_weight: float = 1e-4
    """Weight of load balancing (eq:balance_loss), averaged over layers."""
    z_loss_weight: float = 0.0
    """Weight of the router z-loss (eq:z_loss), averaged over layers."""
    surrogate: Surrogate = "soft_top_k"
    """Soft mask of the router's gradient: `softmax` is the paper's, `soft_top_k` sums to k."""
    surrogate_temperature: float = 1.0
    """Temperature of `soft_top_k`, in units of router logits."""
    unchosen: Unchosen = "mean"
    """What stands, in the router's gradient, for experts that did not run: `mean`: the mean over
    those that did; `zero`: nothing, which makes the chosen ones rise and routing collapse."""
    lora_rank: int = 16
    """Rank of each adapter; an expert has one for each of its three projections."""
    lora_alpha: int = 32
    """Adapters are multiplied by alpha / rank."""
    activation_checkpointing: Annotated[bool, HOW] = False
    """Recompute each layer in the backward pass: less memory, about a third more time."""

    def check(self) -> None:
        """Refuse numbers that no run can use.

        Raises:
            UserError: A number out of its range, or nothing to learn from.
        """
        for name in ("steps", "batch_size", "micro_batch_size", "lora_rank"):
            _require(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("kl_weight", "ce_weight", "balance_weight", "z_loss_weight", "weight_decay"):
            _require(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        above = ("lr", "max_epochs", "max_grad_norm", "surrogate_temperature", "lora_alpha")
        for name in above:
            _require(name, getattr(self, name), getattr(self, name) > 0, "above 0")
        _require("warmup_ratio", self.warmup_ratio, 0 <= self.warmup_ratio <= 1, "in 0 to 1")
        if self.lr_router is not None:
            _require("lr_router", self.lr_router, self.lr_router >= 0, "at least 0")
        if self.kl_weight == self.ce_weight == 0:
            raise UserError(
                "kl_weight and ce_weight are both 0, which leaves nothing to learn from. Raise one."
            )


def steps_to_take(config: FinetuneConfig, num_blocks: int) -> int:
    """`config.steps`, or fewer where the data would be seen more than `max_epochs` times."""
    return min(config.steps, max(1, int(config.max_epochs * num_blocks / config.batch_size)))


def wants_own_teacher(config: FinetuneConfig) -> bool:
    """Whether distillation needs a second copy of the model.

    Where its weights are frozen the model is its own teacher: with all experts on, without routers
    and adapters.
    """
    return config.kl_weight > 0 and config.train == "everything"


def _require(name: str, value: float, allowed: bool, rule: str) -> None:
    if not allowed or not math.isfinite(value):
        raise UserError(f"{name} is {value}, but it must be {rule}. Choose such a number.")
