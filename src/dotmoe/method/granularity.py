"""How finely a layer is split: expert size s, number of experts E, and active experts k.

All layers have the same number of units, so one `Granularity` holds for all; if FFNs and attention
are split, each has its own.
"""

import math
from bisect import bisect
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from dotmoe.common.errors import UserError
from dotmoe.method.config import PAPER_ACTIVE, ExpertsConfig

PAPER_EXPERT_SIZE = 128
"""Neurons in one expert of the paper (tab:hyperparams_moefication)."""
PAPER_HEADS = 2
"""Query heads in one expert of the paper's attention (sec:attention_moe)."""
PAPER_ACTIVE_ATTENTION = 0.5
"""Share of these that run (tab:attention_moe_results)."""
DEFAULT_ACTIVE = 0.75
"""Share of the experts that run by default, half of them always: a chat model of 0.5B parameters
solves two thirds of its programs with it, and far fewer with half (docs/dev/decisions.md)."""
FEWEST_DEFAULT_EXPERTS = (32, 16)
"""Minimum number of experts of the default split, since few leave the router little choice; the
second where the first leaves no size that is a multiple of 4."""
GROUPED_MATMUL_BYTES = 16
"""Stock Transformers runs experts by a grouped matrix product whose strides are multiples of this:
experts and model width in multiples of 8 in bfloat16, of 4 in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Granularity:
    """A valid split: expert, shared and dropped units are all units of a layer, and 1 <= k <= E."""

    num_experts: int
    """Number of experts per layer (E)."""
    expert_size: int
    """Units of one expert (s): FFN neurons or query heads."""
    active_experts: int
    """Number of experts that run per token (k)."""
    shared_size: int = 0
    """Neurons of a layer's shared expert, which runs for every token."""
    dropped_size: int = 0
    """Units of a split layer that belong to no expert and are left out."""
    first_dense_layers: int = 0
    """Leading layers that are not split."""
    target: str = "ffn"
    """What is split, a name of `dotmoe.models.targets.TARGETS`."""

    @property
    def capacity(self) -> tuple[int, ...]:
        """Units of each column of the transport problem: the experts, and a shared one last."""
        shared = (self.shared_size,) if self.shared_size else ()
        return (self.expert_size,) * self.num_experts + shared

    @property
    def columns(self) -> int:
        """Number of columns of the transport problem: E, or E + 1 with a shared expert."""
        return len(self.capacity)

    @property
    def units(self) -> int:
        """Number of units of one layer (N), including dropped ones."""
        return sum(self.capacity) + self.dropped_size

    @property
    def active_units(self) -> int:
        """Number of units of a split layer that run per token."""
        return self.active_experts * self.expert_size + self.shared_size

    @property
    def active_fraction(self) -> float:
        """Share of a split layer's units that run per token, k / E without a shared expert."""
        return self.active_units / self.units

    def with_shared(self, shared_experts: int) -> "Granularity":
        """A copy with some active experts merged into the shared one; as many neurons run."""
        return replace(
            self,
            num_experts=self.num_experts - shared_experts,
            active_experts=self.active_experts - shared_experts,
            shared_size=self.shared_size + shared_experts * self.expert_size,
        )


Splits = tuple[Granularity, ...]
"""The splits of a model, one for each target: of FFNs, of attention, or of both in this order."""


def targets_of(splits: Splits) -> str:
    """What is split, as the option `targets` names it: ffn, attention or both."""
    return "both" if len(splits) > 1 else splits[0].target


def to_record(splits: Splits) -> dict[str, Any]:
    """The form that files on disk record: the first split, with the second one as its `beside`."""
    if len(splits) == 1:
        return asdict(splits[0]) | {"beside": None}
    first, second = splits
    return asdict(first) | {"beside": asdict(second) | {"beside": None}}


def from_record(record: dict[str, Any]) -> Splits:
    """Inverse of `to_record`."""
    first = _without_beside(record)
    beside = record.get("beside")
    if not beside:
        return (Granularity(**first),)
    return (Granularity(**first), Granularity(**_without_beside(beside)))


def _without_beside(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "beside"}


def splits_of(config: ExpertsConfig, ffn_width: int, heads: int) -> Splits:
    """The split of each target of a model: FFNs by `resolve`, heads by `resolve_heads`."""
    of_ffns = (resolve(config, ffn_width),) if config.targets != "attention" else ()
    of_heads = (resolve_heads(config, heads),) if config.targets != "ffn" else ()
    return of_ffns + of_heads


def resolve_heads(config: ExpertsConfig, heads: int) -> Granularity:
    """The split into E_attn = N_h / s_h experts of query heads, with k_attn (sec:attention_moe).

    Raises a `UserError` if the experts do not fit the number of heads.
    """
    sizes = fitting_sizes(heads)
    size = config.heads_per_expert or (PAPER_HEADS if PAPER_HEADS in sizes else 1)
    _require("heads_per_expert", size, sizes, f"{heads} query heads")
    return Granularity(
        num_experts=heads // size,
        expert_size=size,
        active_experts=_part_of(heads // size, config.active_attention or PAPER_ACTIVE_ATTENTION),
        first_dense_layers=config.first_dense_layers or 0,
        target="attention",
    )


def resolve(config: ExpertsConfig, ffn_width: int) -> Granularity:
    """Turn the options into E, s and k for one FFN width.

    By default, s is `default_expert_size`, k is the paper's quarter of E, and nothing is shared; a
    conversion has defaults of its own, see `dotmoe.run.defaults`. A share of E is
    rounded half up, to at least 1. Raises a `UserError` if the experts do not fit the width (it
    names the nearest that do), if k is above E, or if all active experts would be shared.

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
            "active, and at least one must be routed. Set a smaller shared, or a larger active."
        )
    return Granularity(
        num_experts=experts,
        expert_size=ffn_width // experts,
        active_experts=active,
        first_dense_layers=config.first_dense_layers or 0,
    ).with_shared(shared)


def default_expert_size(ffn_width: int) -> int:
    """Size of the experts if none is given.

    Among the divisors of the width up to 128 (tab:hyperparams_moefication) that leave enough
    experts (`FEWEST_DEFAULT_EXPERTS`): the largest multiple of 8, else of 4, else the largest;
    `GROUPED_MATMUL_BYTES` explains why. Raises a `UserError` if the width is below 16 neurons.
    """
    best = 0
    for fewest in FEWEST_DEFAULT_EXPERTS:
        largest = min(PAPER_EXPERT_SIZE, ffn_width // fewest)
        best = _best_aligned([size for size in fitting_sizes(ffn_width) if size <= largest])
        if best and best % 4 == 0:
            break
    if not best:
        raise UserError(
            f"The FFN width is {ffn_width}, but the default split needs at least "
            f"{FEWEST_DEFAULT_EXPERTS[-1]} neurons. Set experts or expert_size."
        )
    return best


def _best_aligned(sizes: list[int]) -> int:
    """The largest multiple of 8, else of 4, else the largest of all; 0 if there are none."""
    for factor in (8, 4, 1):
        multiples = [size for size in sizes if size % factor == 0]
        if multiples:
            return max(multiples)
    return 0


def fitting_sizes(units: int) -> list[int]:
    """Expert sizes that divide the units into two or more experts, ascending."""
    return [size for size in range(1, units // 2 + 1) if units % size == 0]


def _part_of(experts: int, share: float) -> int:
    """A share of the experts as a whole number, rounded half up, at least 1.

    It uses the decimal the user wrote, not its binary neighbour: 0.29 of 50 is 14.5, rounded to 15.
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
