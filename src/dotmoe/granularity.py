"""How finely a layer is split: expert size s, experts E and active experts k of so many units.

And what that makes of the parameters, exactly, from the Hugging Face config alone. Every layer has
as many units: one `Granularity` holds for all.
"""

import math
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any, Literal, TypeVar

from dotmoe.errors import UserError
from dotmoe.models.family import Family, meta_model, num_parameters
from dotmoe.options import above, at_least, at_most

PAPER_EXPERT_SIZE, PAPER_ACTIVE = 128, 0.25
"""Neurons in one expert (tab:hyperparams_moefication); share of experts that run (main tables)."""
PAPER_HEADS, PAPER_ACTIVE_ATTENTION = 2, 0.5
"""The same of query heads (sec:attention_moe, tab:attention_moe_results)."""
FEWEST_DEFAULT_EXPERTS = 16
"""The default never splits more coarsely than this: few experts leave the router little choice."""
GROUPED_MATMUL_BYTES = 16
"""Stock Transformers runs experts by a grouped matrix product whose strides are multiples of this:
experts and model width in multiples of 8 in bfloat16, of 4 in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """Size of the experts and how many of them run per token, a shared expert's parts included."""

    expert_size: Annotated[int | None, at_least(1)] = None
    """Neurons in one expert (s), a divisor of the FFN width. Left out: 128, or less if need be."""
    experts: Annotated[int | None, at_least(2)] = None
    """Experts a layer (E), at least 2. Give this or `expert_size`."""
    active: Annotated[float | None, above(0), at_most(1)] = None
    """Share of the experts that run per token, above 0 and at most 1. Left out: 0.25 (paper)."""
    active_experts: Annotated[int | None, at_least(1)] = None
    """Experts that run per token (k), 1 to E. Give this or `active`."""
    shared: Annotated[float, at_least(0), at_most(1)] = 0.0
    """Share of the FFN that runs for every token, as one shared expert: so many of the active
    experts are merged into it, fewer than run."""
    first_dense_layers: Annotated[int, at_least(0)] = 0
    """Leading layers that are not split, below the number of layers."""
    targets: Literal["ffn", "attention", "both"] = "ffn"
    """What is split: FFNs into experts of neurons, attention into experts of query heads, or both.
    What is said above of experts is said of those of neurons."""
    heads_per_expert: Annotated[int | None, at_least(1)] = None
    """Query heads in one expert (s_h), a divisor of their number. Left out: 2 (paper), or 1."""
    active_attention: Annotated[float | None, above(0), at_most(1)] = None
    """Share of the experts made of heads that run per token. Left out: 0.5 (paper)."""

    def check_together(self) -> None:
        """Refuse what says nothing of the targets, or twice the same."""
        for name, other in (("expert_size", "experts"), ("active", "active_experts")):
            value, beside = getattr(self, name), getattr(self, other)
            if None not in (value, beside):
                raise UserError(
                    f"{name} is {value:g} and {other} is {beside:g}, but one of them says it all. "
                    "Give one of the two."
                )
        for name in ("heads_per_expert", "active_attention"):
            if self.targets == "ffn" and getattr(self, name) is not None:
                raise UserError(
                    f"{name} is {getattr(self, name):g}, but targets is ffn: no heads become "
                    "experts. Set targets to attention or both, or leave it out."
                )
        if self.targets != "ffn" and self.shared:
            raise UserError(
                f"shared is {self.shared:g}, but a shared expert is for targets ffn alone. Leave "
                "one of the two out."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Granularity:
    """A split that fits: E * s and the shared units make up all of a layer's, 1 <= k <= E."""

    num_experts: int
    """Experts a layer (E)."""
    expert_size: int
    """Units of one expert (s): FFN neurons or query heads."""
    active_experts: int
    """Experts that run per token (k)."""
    shared_size: int = 0
    """Neurons of a layer's shared expert, which runs for every token."""
    dropped_size: int = 0
    """Units of a split layer that belong to no expert, and are left out."""
    first_dense_layers: int = 0
    """Leading layers that are not split."""
    target: str = "ffn"
    """What is split, a name of `dotmoe.models.family.TARGETS`."""
    beside: "Granularity | None" = None
    """The split of attention, where that of FFNs is not all."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Granularity":
        """Inverse of `dataclasses.asdict`."""
        beside = values.get("beside")
        return cls(**values | {"beside": cls.of(beside) if beside else None})

    @property
    def targets(self) -> str:
        """What is split: ffn, attention or both."""
        return "both" if self.beside else self.target

    @property
    def capacity(self) -> tuple[int, ...]:
        """Units of each column of the transport problem: the experts, and a shared one last."""
        shared = (self.shared_size,) if self.shared_size else ()
        return (self.expert_size,) * self.num_experts + shared

    @property
    def columns(self) -> int:
        """Columns of the transport problem, E or E + 1."""
        return len(self.capacity)

    @property
    def units(self) -> int:
        """Units of one layer (N), those that are left out too."""
        return sum(self.capacity) + self.dropped_size

    @property
    def active_units(self) -> int:
        """Units of a split layer that run per token."""
        return self.active_experts * self.expert_size + self.shared_size

    @property
    def active_fraction(self) -> float:
        """Share of a split layer's units that run per token, k / E without a shared expert."""
        return self.active_units / self.units

    def with_shared(self, shared_experts: int) -> "Granularity":
        """So many of the active experts merged into the shared expert; as many neurons run."""
        return replace(
            self,
            num_experts=self.num_experts - shared_experts,
            active_experts=self.active_experts - shared_experts,
            shared_size=self.shared_size + shared_experts * self.expert_size,
        )


Whole = TypeVar("Whole", bound=Any)
"""A dataclass that says something of FFNs, and of attention as `beside`; or of either alone."""


def parts_of(whole: Whole) -> list[Whole]:
    """What is said of each target, apart; of one without a second itself."""
    return [whole] if whole.beside is None else [replace(whole, beside=None), whole.beside]


def joined(parts: Iterable[Whole]) -> Whole:
    """Inverse of `parts_of`."""
    first, *rest = parts
    return replace(first, beside=rest[0]) if rest else first


def splits_of(config: ExpertsConfig, ffn_width: int, heads: int) -> Granularity:
    """The split of each target of a model, see `resolve`; of heads by `resolve_heads`."""
    of_ffns = [resolve(config, ffn_width)] if config.targets != "attention" else []
    of_heads = [resolve_heads(config, heads)] if config.targets != "ffn" else []
    return joined(of_ffns + of_heads)


def resolve_heads(config: ExpertsConfig, heads: int) -> Granularity:
    """E_attn = N_h / s_h experts of query heads, and k_attn (sec:attention_moe).

    Raises a `UserError`: experts that do not fit the number of heads.
    """
    sizes = fitting_sizes(heads)
    size = config.heads_per_expert or (PAPER_HEADS if PAPER_HEADS in sizes else 1)
    _require("heads_per_expert", size, sizes, f"{heads} query heads")
    return Granularity(
        num_experts=heads // size,
        expert_size=size,
        active_experts=_part_of(heads // size, config.active_attention or PAPER_ACTIVE_ATTENTION),
        first_dense_layers=config.first_dense_layers,
        target="attention",
    )


def resolve(config: ExpertsConfig, ffn_width: int) -> Granularity:
    """Turn what was asked for into E, s and k for one FFN width.

    What is not given: s is `default_expert_size`, and k is a quarter of E. A share of E is rounded
    half up, to at least 1. Raises a `UserError`: experts that do not fit the width (the nearest
    that do are named), k above E, or a shared expert of all that is active.

    Example:
        >>> resolve(ExpertsConfig(), 11_008)
        Granularity(num_experts=86, expert_size=128, active_experts=22, ...)
    """
    sizes, whole = fitting_sizes(ffn_width), f"FFN width {ffn_width}"
    if config.experts is None:
        size = config.expert_size or default_expert_size(ffn_width)
        _require("expert_size", size, sizes, whole)
        experts = ffn_width // size
    else:
        experts = config.experts
        _require("experts", experts, [ffn_width // n for n in reversed(sizes)], whole)
    active = config.active_experts or _part_of(experts, config.active or PAPER_ACTIVE)
    if active > experts:
        raise UserError(
            f"active_experts is {active}, but a layer has {experts} experts. Choose 1 to "
            f"{experts}, or a smaller expert_size."
        )
    shared = _part_of(experts, config.shared) if config.shared else 0
    if shared >= active:
        raise UserError(
            f"shared {config.shared:g} of {experts} experts is {shared}, but only {active} are "
            "active, of which one must be routed. Set a smaller shared, or a larger active."
        )
    return Granularity(
        num_experts=experts,
        expert_size=ffn_width // experts,
        active_experts=active,
        first_dense_layers=config.first_dense_layers,
    ).with_shared(shared)


def default_expert_size(ffn_width: int) -> int:
    """Size of the experts where none is asked for.

    Among the divisors of the width up to 128 (tab:hyperparams_moefication) that leave at least 16
    experts: the largest multiple of 8, else of 4, else the largest; `GROUPED_MATMUL_BYTES` says
    why. Raises a `UserError`: the width has fewer than 16 neurons.
    """
    largest = min(PAPER_EXPERT_SIZE, ffn_width // FEWEST_DEFAULT_EXPERTS)
    if not largest:
        raise UserError(
            f"The FFN width is {ffn_width}, but the default split needs at least "
            f"{FEWEST_DEFAULT_EXPERTS} neurons. Set experts or expert_size."
        )
    sizes = [size for size in fitting_sizes(ffn_width) if size <= largest]
    return max(sizes, key=lambda size: (size % 8 == 0, size % 4 == 0, size))


def fitting_sizes(units: int) -> list[int]:
    """Sizes that divide the units and leave two experts or more, ascending."""
    return [size for size in range(1, units // 2 + 1) if units % size == 0]


def _part_of(experts: int, share: float) -> int:
    """A share in whole experts, at least 1, rounded half up.

    Of the decimal the user wrote, not its binary neighbour: 0.29 of 50 is 14.5 and rounds to 15.
    """
    return max(1, math.floor(Fraction(str(float(share))) * experts + Fraction(1, 2)))


def _require(name: str, value: int, ascending: list[int], whole: str) -> None:
    if value not in ascending:
        place = bisect(ascending, value)
        choose = " or ".join(map(str, ascending[max(0, place - 1) : place + 1]))
        raise UserError(
            f"{name} is {value}, which does not divide the {whole} into 2 or more equal experts. "
            f"Choose {choose or 'another model'}."
        )


# --- parameters ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """Counts of whole parameters; a tied output head is counted once."""

    dense_total: int
    stored: int
    """The dense model's and the routers', less what is dropped: what files must hold."""
    active: int
    """Parameters that work on one token, without routers: the figure that papers print."""
    active_with_routers: int
    """The same with the router rows, all of which are read for every token."""
    active_without_embeddings: int
    """`active` without the input embedding and the output head."""
    floor: int
    """Everything outside what is split."""
    attention_and_norms: int
    input_embedding: int
    """The token embedding (and the head, if tied to it)."""
    output_head: int
    """The output projection; 0 if tied to the embedding."""
    ffn_total: int
    ffn_active: int
    """Those that work on one token."""
    heads_total: int
    """Those that belong to one query head each, in W_Q and W_O; 0 where attention is not split."""
    routers: int
    """Router rows of all split layers."""

    @property
    def active_fraction(self) -> float:
        """`active / dense_total`: what is left of the model, unlike the share of FFN neurons."""
        return self.active / self.dense_total


def count_parameters(config: Any, family: Family, granularity: Granularity) -> ParameterCounts:
    """Exact counts of a dense model and its split.

        active = all - (1 - k / E) * FFN        (FFN = 3 * d * d_ffn * L)
        stored = all + L * E * d - 3 * d * dropped * L

    where L counts the split layers only, and a shared expert is active. Of attention, 1 - k / E of
    W_Q and W_O (2 * d * d_h * N_h * L, and a bias of queries) is idle; of W_O alone where all
    queries are normed at once, since that needs them all. The split must be of the model's units.
    """
    model, traits = meta_model(config), family.traits(config)
    total, width = num_parameters(model), config.hidden_size
    ffn_total = 3 * width * config.intermediate_size * config.num_hidden_layers
    embedding = model.get_input_embeddings().weight.numel()  # type: ignore[operator]
    head = total - num_parameters(family.trunk(model))
    of_a_query = 0 if traits.qk_norm == "full" else width + traits.qkv_bias
    of_a_unit = {"ffn": 3 * width, "attention": traits.head_dim * (width + of_a_query)}
    whole, idle = {"ffn": 0, "attention": 0}, {"ffn": 0, "attention": 0}
    dropped = routers = 0
    for split in parts_of(granularity):
        layers = config.num_hidden_layers - split.first_dense_layers
        size = of_a_unit[split.target]
        whole[split.target] = config.num_hidden_layers * split.units * size
        idle[split.target] = layers * (split.units - split.active_units) * size
        dropped += layers * split.dropped_size * size
        routers += layers * split.num_experts * width
    active = total - sum(idle.values())
    return ParameterCounts(
        dense_total=total,
        stored=total + routers - dropped,
        active=active,
        active_with_routers=active + routers,
        active_without_embeddings=active - embedding - head,
        floor=total - sum(whole.values()),
        attention_and_norms=total - ffn_total - embedding - head,
        input_embedding=embedding,
        output_head=head,
        ffn_total=ffn_total,
        ffn_active=ffn_total - idle["ffn"],
        heads_total=whole["attention"],
        routers=routers,
    )


def nearest_active_experts(
    share: float, config: Any, family: Family, granularity: Granularity
) -> int:
    """The k at which about that share of the dense model's parameters works on one token.

    Of a split of FFNs without a shared expert, whose own k does not matter; shared experts that are
    to be are counted in k. A `UserError`: one expert a layer is more than that.
    """
    experts, one = granularity.num_experts, replace(granularity, active_experts=1)
    least = count_parameters(config, family, one)
    an_expert = (least.dense_total - least.active) / (experts - 1)
    active = experts - round((1 - share) * least.dense_total / an_expert)
    if active < 1:
        raise UserError(
            f"active_params is {share:g}, but {least.active_fraction:.3f} of the parameters work "
            "on a token where one expert a layer runs. Choose at least that."
        )
    return active
