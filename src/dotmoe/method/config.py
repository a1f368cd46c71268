"""Options of the stages of the method."""

from dataclasses import dataclass
from typing import Annotated, Literal

from dotmoe.common.errors import UserError
from dotmoe.common.options import HOW, above, at_least, at_most, between
from dotmoe.training.config import Schedule

PAPER_ACTIVE = 0.25
"""Share of experts that run (main tables)."""
Start = Literal["data", "random"]
Train = Literal["everything", "experts", "lora"]
Surrogate = Literal["softmax", "soft_top_k"]
"""`softmax` is the paper's; the rows of `soft_top_k` sum to k, as those of the mask do."""


_SIZES, _SHARES = ("expert_size", "experts"), ("active", "active_experts", "keep")
ALTERNATIVES = (_SIZES, _SHARES)
"""Options of which each determines the others of its group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """Size of the experts and how many run per token, including those merged into a shared one."""

    expert_size: Annotated[int | None, at_least(1)] = None
    """Neurons in one expert (s), a divisor of the FFN width. Default: 128 or a smaller divisor;
    a larger one where llama.cpp would not run as many experts as then run per token."""
    experts: Annotated[int | None, at_least(2)] = None
    """Number of experts per layer (E), at least 2. Give this or `expert_size`."""
    active: Annotated[float | None, above(0), at_most(1)] = None
    """Share of the experts that run per token, above 0 and at most 1. Default: 0.75 (paper: a
    quarter)."""
    active_experts: Annotated[int | None, at_least(1)] = None
    """Number of experts that run per token (k), 1 to E. Give this or `active`."""
    keep: Annotated[float | None, above(0), at_most(1)] = None
    """Instead of `active`, how much to keep of a chat model: the share of the tokens of held-out
    own answers at which the converted model has the dense model's most likely token, such as 0.9.
    The smallest share of the experts that keeps so much, in eighths, is tried, chosen, converted
    and measured. For `dotmoe convert` alone."""
    shared: Annotated[float | None, at_least(0), at_most(1)] = None
    """Share of the FFN that runs for every token, as one shared expert. That share of the experts
    is taken from the active ones and merged; at least one active expert must remain. Default: half
    of the active share, where a format holds it with the same context, else 0 (paper: 0)."""
    first_dense_layers: Annotated[int | None, at_least(0)] = None
    """Leading layers that are not split, below the number of layers. Default: measured on the text,
    for models of 12 layers or more, where a format holds them with the same context (paper: 0)."""
    targets: Literal["ffn", "attention", "both"] = "ffn"
    """What is split: FFNs into experts of neurons, attention into experts of query heads, or both.
    The expert options above are for experts of neurons."""
    heads_per_expert: Annotated[int | None, at_least(1)] = None
    """Query heads in one expert (s_h), a divisor of their number. Default: 2 (paper), or 1."""
    active_attention: Annotated[float | None, above(0), at_most(1)] = None
    """Share of the experts made of heads that run per token. Default: 0.5 (paper)."""

    def check_together(self) -> None:
        """Refuse options that do not apply to the targets, or that set the same value twice."""
        for name, other in (_SIZES, _SHARES[:2]):
            value, beside = getattr(self, name), getattr(self, other)
            if None not in (value, beside):
                raise UserError(
                    f"{name} is {value:g} and {other} is {beside:g}, but each determines the "
                    "other. Give only one of the two."
                )
        for name in ("active", "active_experts"):
            value = getattr(self, name)
            if self.keep is not None and value is not None:
                raise UserError(
                    f"keep is {self.keep:g} and {name} is {value:g}, but keep chooses how many "
                    "experts run. Give only one of the two."
                )
        for name in ("heads_per_expert", "active_attention"):
            if self.targets == "ffn" and getattr(self, name) is not None:
                raise UserError(
                    f"{name} is {getattr(self, name):g}, but targets is ffn: no heads become "
                    "experts. Set targets to attention or both, or leave this option out."
                )
        if self.targets != "ffn" and self.shared:
            raise UserError(
                f"shared is {self.shared:g}, but only targets ffn can have a shared expert. Set "
                "shared to 0, or targets to ffn."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateConfig:
    """Options of the initial affinities and routers."""

    start: Start = "data"
    """`data`: fit routers by ridge regression on text, and give each expert the neurons that are
    needed when its router runs it. `random`: the paper's random start."""
    calibration_tokens: Annotated[int, at_least(1)] | None = None
    """Number of tokens whose activations are used, drawn evenly over the text. Default: 40 times
    the model width. Only for the start from data."""
    ridge: Annotated[float, above(0)] = 0.01
    """Ridge penalty of the router regression, as a share of the mean input power."""

    def tokens(self, width: int) -> int:
        """`calibration_tokens`, or as many as ridge regression needs to hold on other text."""
        return self.calibration_tokens or 40 * width


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignmentConfig:
    """Options of the transport problem that assigns units to experts by their affinities."""

    tau_start: Annotated[float, above(0)] = 1.0
    """Transport temperature at the first step, in units of affinity (paper: 1.0)."""
    tau_end: Annotated[float, above(0)] = 0.1
    """Transport temperature after the warm-up and in every extraction (paper: 0.1)."""
    solver: Literal["newton", "sinkhorn"] = "newton"
    """`newton`: semi-dual Newton with implicit gradient, to convergence. `sinkhorn`: the paper's 50
    unrolled sweeps."""

    def tau(self, step: int, warmup_steps: int) -> float:
        """Temperature of a step: linear in the warm-up, then constant (app:log_domain_sinkhorn)."""
        if step >= warmup_steps:
            return self.tau_end
        return self.tau_start + (self.tau_end - self.tau_start) * (step / warmup_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """Options that alignment and finetuning share, with the defaults of alignment.

    The defaults are the paper's (tab:hyperparams_moefication) unless noted otherwise.
    """

    steps: Annotated[int, at_least(0)] = 3500
    """Number of optimizer steps of the alignment; 0: none, the start is extracted unchanged."""
    batch_size: Annotated[int, at_least(1)] = 64
    """Sequences per step of the alignment, over all ranks, which share them equally."""
    micro_batch_size: Annotated[int, at_least(1)] = 4
    """Sequences per forward pass; gradients accumulate over the batch. It affects memory and, of
    the losses, only load balancing, which counts tokens per micro-batch. Fixed when resuming."""
    max_epochs: Annotated[float, above(0)] | None = 4.0
    """Maximum passes over the data; if `steps` exceeds them, fewer are taken, with a warning. None:
    no maximum (paper)."""
    lr: Annotated[float, above(0)] = 5e-4
    """Peak learning rate of the alignment, of all parameters without a rate of their own."""
    lr_router: Annotated[float, at_least(0)] | None = None
    """Peak learning rate of the routers; 0: they stay as they are. Default: lr."""
    weight_decay: Annotated[float, at_least(0)] = 1e-4
    """AdamW weight decay."""
    warmup_ratio: Annotated[float, between(0, 1)] = 0.2
    """Share of the steps in which the learning rate rises linearly and, in alignment, the
    temperature falls; afterwards the learning rate falls as a cosine."""
    max_grad_norm: Annotated[float, above(0)] = 1.0
    """Maximum norm of the gradients; larger ones are scaled down to it."""
    kl_weight: Annotated[float, at_least(0)] = 2.0
    """Weight of the distillation loss KL(dense || MoE) of the alignment."""
    ce_weight: Annotated[float, at_least(0)] = 1.0
    """Weight of the next-token cross-entropy loss."""
    z_loss_weight: Annotated[float, at_least(0)] = 1e-3
    """Weight of the router z-loss (eq:z_loss), averaged over layers."""
    balance_weight: Annotated[float, at_least(0)] = 1e-2
    """Weight of the load-balancing loss (eq:balance_loss), averaged over layers."""
    surrogate: Surrogate = "soft_top_k"
    """Soft mask for the router's gradient: `softmax` (paper) or `soft_top_k` (rows sum to k)."""
    router_dtype: Literal["float32", "model"] = "float32"
    """Dtype in which routers compute while they are trained, and are stored in alignment: `model`
    is the model's own (paper). Extraction, evaluation and exports route in float32."""
    activation_checkpointing: Annotated[bool, HOW] = False
    """Recompute each layer in the backward pass: less memory, about a third more time."""

    @property
    def router_loss_weights(self) -> dict[str, float]:
        """Weights of the router losses, by the names of `ROUTER_LOSSES`."""
        return {"z": self.z_loss_weight, "balance": self.balance_weight}

    def check_together(self) -> None:
        """Refuse loss weights that leave nothing to learn from."""
        if self.kl_weight == self.ce_weight == 0:
            raise UserError(
                "kl_weight and ce_weight are both 0, which leaves nothing to learn from. Raise one."
            )

    def schedule(self, num_blocks: int) -> Schedule:
        """Training schedule on a text of `num_blocks` blocks, within `max_epochs`."""
        steps = self.steps
        if self.max_epochs is not None:
            steps = min(steps, max(1, int(self.max_epochs * num_blocks / self.batch_size)))
        return Schedule(
            steps=steps,
            warmup_steps=round(self.warmup_ratio * steps),
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignConfig(ObjectiveConfig):
    """Options of the alignment: gradient steps that learn experts and routers, off by default."""

    learn_assignment: bool = True
    """If false, keep the initial split and train only routers (as the random-split baseline)."""

    def check_together(self) -> None:
        """Refuse options that leave nothing to learn, or nothing to learn from."""
        ObjectiveConfig.check_together(self)
        if not self.learn_assignment and self.lr_router == 0:
            raise UserError(
                "lr_router is 0 and learn_assignment is off, which leaves nothing to train. Raise "
                "lr_router, or keep learn_assignment."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairConfig:
    """Options of a repair: train the FFNs, or refit their W_down; refit W_O of attention."""

    repair_tokens: Annotated[int, at_least(1)] | None = None
    """Maximum number of training tokens that a repair is fitted to, drawn evenly over the text.
    Default: 40 for each input of a projection, such as a neuron of an FFN."""
    repair_epochs: Annotated[int, at_least(0)] = 2
    """Number of passes over these tokens that train all three projections of each FFN, layer by
    layer. 0: no training; W_down alone is refitted in closed form, as it also is where held-out
    text gains nothing from training. Attention is only refitted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneConfig(ObjectiveConfig):
    """Options of the finetuning; here the paper's (tab:hyperparams_sft), others in recipes."""

    train: Train = "everything"
    """everything: all weights, as in the paper; experts: those of the split FFNs; lora: low-rank
    adapters on experts and attention (needs `pip install -e '.[lora]'`). Each also trains the
    routers, unless `lr_router` is 0."""
    steps: Annotated[int, at_least(1)] = 4578
    """Number of optimizer steps of the finetuning. 4578 steps of 128 x 2048 tokens are the paper's
    1.2B tokens."""
    batch_size: Annotated[int, at_least(1)] = 128
    """Sequences per step of the finetuning, over all ranks, which share them equally."""
    lr: Annotated[float, above(0)] | None = 5e-5  # type: ignore[assignment]
    """Peak learning rate of the finetuning (of routers: `lr_router`). Default: 0.05 % of the root
    mean square of the model's matrices (9e-5 for SmolLM2, 9e-6 for Qwen2.5), for adapters 4e-4."""
    warmup_ratio: Annotated[float, between(0, 1)] = 0.1
    kl_weight: Annotated[float, at_least(0)] = 0.0
    """Weight of KL(dense || MoE) of the finetuning, distillation from the dense model; 0: none, as
    in the paper. Without adapters it needs a second copy of the model."""
    z_loss_weight: Annotated[float, at_least(0)] = 0.0
    balance_weight: Annotated[float, at_least(0)] = 1e-4
    unchosen: Literal["mean", "zero"] = "mean"
    """Gradient of the routing mask for experts that did not run: `mean` of those that ran, as their
    output is unknown; `zero`, as for the paper's sliced experts."""
    offload: Annotated[bool, HOW] = False
    """Keep weights, gradients and moments in the host's memory and run the optimizer there: a GPU
    holds a layer only while it computes. Slower; on by itself where nothing else would fit."""
    lora_rank: Annotated[int, at_least(1)] = 16
    """Rank of each adapter, whose output is scaled by 32 / rank; an expert has one adapter for each
    of its three projections."""
