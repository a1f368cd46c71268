"""How finely an FFN is split: expert size s, experts E and active experts k of one FFN width.

Every layer of a supported model has the same width, so one `Granularity` holds for all of them.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from dotmoe.errors import UserError
from dotmoe.options import above, at_least, at_most

PAPER_EXPERT_SIZE = 128
"""Neurons in one expert (tab:hyperparams_moefication)."""
PAPER_ACTIVE = 0.25
"""Share of experts that run in the paper's main tables."""
FEWEST_DEFAULT_EXPERTS = 16
"""The default never splits more coarsely than this: few experts leave the router little choice."""
GROUPED_MATMUL_BYTES = 16
"""Stock Transformers runs experts by a grouped matrix product whose strides are multiples of this:
experts and model width in multiples of 8 in bfloat16, of 4 in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """Size of the experts and how many of them run per token."""

    expert_size: Annotated[int | None, at_least(1)] = None
    """Neurons in one expert (s), a divisor of the FFN width. Left out: 128, or less if need be."""
    experts: Annotated[int | None, at_least(2)] = None
    """Experts a layer (E), at least 2. Give this or `expert_size`."""
    active: Annotated[float | None, above(0), at_most(1)] = None
    """Share of the experts that run per token, above 0 and at most 1. Left out: 0.25 (paper)."""
    active_experts: Annotated[int | None, at_least(1)] = None
    """Experts that run per token (k), 1 to E. Give this or `active`."""
    first_dense_layers: Annotated[int, at_least(0)] = 0
    """Leading layers that are not split, below the number of layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Granularity:
    """A split that fits: E * s and the shared neurons make the FFN width, 1 <= k <= E."""

    num_experts: int
    """Experts a layer (E)."""
    expert_size: int
    """Neurons of one expert (s)."""
    active_experts: int
    """Experts that run per token (k)."""
    shared_size: int = 0
    """Neurons of a layer's shared expert, which runs for every token."""
    first_dense_layers: int = 0
    """Leading layers that are not split."""

    @property
    def ffn_width(self) -> int:
        """Neurons of one FFN, E * s and the shared expert's."""
        return self.num_experts * self.expert_size + self.shared_size

    @property
    def active_neurons(self) -> int:
        """Neurons of a split FFN that run per token."""
        return self.active_experts * self.expert_size + self.shared_size

    @property
    def active_fraction(self) -> float:
        """Share of a split FFN's neurons that run per token, k / E without a shared expert."""
        return self.active_neurons / self.ffn_width


def resolve(config: ExpertsConfig, ffn_width: int) -> Granularity:
    """Turn what was asked for into E, s and k for one FFN width.

    What is not given: s is `default_expert_size`, and k is a quarter of E. A share of E is rounded
    half up, to at least 1.

    Raises:
        UserError: Size or count does not divide the width (the nearest that do are named), fewer
            than two experts, a share outside (0, 1], k outside 1 to E, or two settings that
            contradict each other.

    Example:
        >>> resolve(ExpertsConfig(), 11_008)
        Granularity(num_experts=86, expert_size=128, active_experts=22, ...)
    """
    expert_size = _expert_size(config, ffn_width)
    num_experts = ffn_width // expert_size
    return Granularity(
        num_experts=num_experts,
        expert_size=expert_size,
        active_experts=_active_experts(config, num_experts),
        first_dense_layers=config.first_dense_layers,
    )


def default_expert_size(ffn_width: int) -> int:
    """Size of the experts where none is asked for.

    Among the divisors of the width up to 128 (tab:hyperparams_moefication) that leave at least 16
    experts: the largest multiple of 8, else of 4, else the largest. Multiples of 8 can be exported
    in every dtype, multiples of 4 in float32 (`GROUPED_MATMUL_BYTES`).

    Raises:
        UserError: The width has fewer than 16 neurons.

    Example:
        >>> [default_expert_size(width) for width in (11_008, 768, 172)]
        [128, 48, 4]
    """
    if ffn_width < FEWEST_DEFAULT_EXPERTS:
        raise UserError(
            f"The FFN width is {ffn_width}, but the default split needs at least "
            f"{FEWEST_DEFAULT_EXPERTS} neurons. Set experts or expert_size."
        )
    largest = min(PAPER_EXPERT_SIZE, ffn_width // FEWEST_DEFAULT_EXPERTS)
    sizes = [size for size in range(1, largest + 1) if ffn_width % size == 0]
    return max(sizes, key=lambda size: (size % 8 == 0, size % 4 == 0, size))


def nearest_expert_sizes(size: int, ffn_width: int, *, multiple: int) -> tuple[int, ...]:
    """Expert sizes next below and above one that does not fit; empty where there is none.

    Args:
        size: Neurons of an expert (s).
        ffn_width: Neurons of one FFN; sizes divide it and leave at least two experts.
        multiple: What sizes must be a multiple of.

    Example:
        >>> nearest_expert_sizes(6, 96, multiple=4)
        (4, 8)
    """
    sizes = [n for n in range(multiple, ffn_width // 2 + 1, multiple) if ffn_width % n == 0]
    return _next_to(size, sizes)


def _expert_size(config: ExpertsConfig, ffn_width: int) -> int:
    size, experts = config.expert_size, config.experts
    if experts is not None:
        _require_divisor("experts", experts, ffn_width, smallest=2, largest=ffn_width)
        if size not in (None, ffn_width // experts):
            raise UserError(
                f"expert_size {size} and experts {experts} make {size * experts} neurons, but the "
                f"FFN width is {ffn_width}. Give one of the two."
            )
        return ffn_width // experts
    if size is None:
        return default_expert_size(ffn_width)
    _require_divisor("expert_size", size, ffn_width, smallest=1, largest=ffn_width // 2)
    return size


def _active_experts(config: ExpertsConfig, num_experts: int) -> int:
    share, active_experts = config.active, config.active_experts
    if active_experts is not None and not 1 <= active_experts <= num_experts:
        raise UserError(
            f"active_experts is {active_experts}, but a layer has {num_experts} experts. "
            f"Choose 1 to {num_experts}, or a smaller expert_size."
        )
    if share is None and active_experts is not None:
        return active_experts
    share = PAPER_ACTIVE if share is None else share
    if not 0 < share <= 1:
        raise UserError(
            f"active is {share:g}, but the share of experts that run must be above 0 and at most "
            f"1. For a quarter of them set active to 0.25."
        )
    # The decimal the user wrote, not its binary neighbour: 0.29 of 50 is 14.5 and rounds to 15.
    rounded = math.floor(Fraction(str(float(share))) * num_experts + Fraction(1, 2))
    from_share = max(1, rounded)
    if active_experts not in (None, from_share):
        raise UserError(
            f"active {share:g} of {num_experts} experts is {from_share}, but active_experts is "
            f"{active_experts}. Give one of the two."
        )
    return from_share


def _require_divisor(name: str, value: int, width: int, *, smallest: int, largest: int) -> None:
    near = _next_to(value, [n for n in range(smallest, largest + 1) if width % n == 0])
    choose = " or ".join(map(str, near)) or "another model: this width has no divisor"
    if not smallest <= value <= largest:
        raise UserError(
            f"{name} is {value}, but for the FFN width {width} it must be {smallest} to {largest}, "
            f"so that there are at least 2 experts. Choose {choose}."
        )
    if width % value:
        raise UserError(
            f"{name} is {value}, which does not divide the FFN width {width} into equal experts. "
            f"Choose {choose}."
        )


def _next_to(value: int, ascending: list[int]) -> tuple[int, ...]:
    """The last below and the first above a value, where there are such."""
    below = [n for n in ascending if n < value]
    above = [n for n in ascending if n > value]
    return (*below[-1:], *above[:1])
