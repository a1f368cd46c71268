"""How finely an FFN is split: expert size s, experts E and active experts k of one FFN width.

Every layer of a supported model has the same width, so one `Granularity` holds for all of them.
"""

import math
from dataclasses import dataclass, replace
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

    def with_shared(self, shared_experts: int) -> "Granularity":
        """So many of the active experts merged into the shared expert; as many neurons run."""
        return replace(
            self,
            num_experts=self.num_experts - shared_experts,
            active_experts=self.active_experts - shared_experts,
            shared_size=self.shared_size + shared_experts * self.expert_size,
        )

    @property
    def capacity(self) -> int | tuple[int, ...]:
        """Neurons of every expert, or of each column of the transport problem, shared one last."""
        if not self.shared_size:
            return self.expert_size
        return (*[self.expert_size] * self.num_experts, self.shared_size)

    @property
    def columns(self) -> int:
        """Columns of the transport problem, E or E + 1."""
        return self.num_experts + bool(self.shared_size)

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
        UserError: Experts that do not fit the width (the nearest that do are named), k above E, or
            two settings that contradict each other.

    Example:
        >>> resolve(ExpertsConfig(), 11_008)
        Granularity(num_experts=86, expert_size=128, active_experts=22, ...)
    """
    size, experts, share = config.expert_size, config.experts, config.active
    sizes = _sizes(ffn_width)
    counts = [ffn_width // n for n in reversed(sizes)]
    for name, value, fitting in (("experts", experts, counts), ("expert_size", size, sizes)):
        if value is not None and value not in fitting:
            choose = " or ".join(map(str, _next_to(value, fitting))) or "another model"
            raise UserError(
                f"{name} is {value}, which does not divide the FFN width {ffn_width} into 2 or "
                f"more equal experts. Choose {choose}."
            )
    if size and experts and size * experts != ffn_width:
        raise UserError(
            f"expert_size {size} and experts {experts} make {size * experts} neurons, but the "
            f"FFN width is {ffn_width}. Give one of the two."
        )
    size = size or (ffn_width // experts if experts else default_expert_size(ffn_width))
    experts, active = ffn_width // size, config.active_experts
    if active is None or share is not None:
        share = PAPER_ACTIVE if share is None else share
        rounded = _part_of(experts, share)
        if active not in (None, rounded):
            raise UserError(
                f"active {share:g} of {experts} experts is {rounded}, but active_experts is "
                f"{active}. Give one of the two."
            )
        active = rounded
    if active > experts:
        raise UserError(
            f"active_experts is {active}, but a layer has {experts} experts. Choose 1 to "
            f"{experts}, or a smaller expert_size."
        )
    split = Granularity(
        num_experts=experts,
        expert_size=size,
        active_experts=active,
        first_dense_layers=config.first_dense_layers,
    )
    shared = _part_of(experts, config.shared) if config.shared else 0
    if shared >= active:
        raise UserError(
            f"shared {config.shared:g} of {experts} experts is {shared}, but only {active} are "
            "active, of which one must be routed. Set a smaller shared, or a larger active."
        )
    return split.with_shared(shared)


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
    sizes = [size for size in _sizes(ffn_width) if size <= largest]
    return max(sizes, key=lambda size: (size % 8 == 0, size % 4 == 0, size))


def nearest_expert_sizes(size: int, ffn_width: int, *, multiple: int = 1) -> tuple[int, ...]:
    """Largest size below and smallest above `size` that fit, where there are such.

    They are of the given multiple, divide the width and leave at least two experts.

    Example:
        >>> nearest_expert_sizes(6, 96, multiple=4)
        (4, 8)
    """
    return _next_to(size, [n for n in _sizes(ffn_width) if n % multiple == 0])


def _part_of(experts: int, share: float) -> int:
    """A share in whole experts, at least 1, rounded half up.

    Of the decimal the user wrote, not its binary neighbour: 0.29 of 50 is 14.5 and rounds to 15.
    """
    return max(1, math.floor(Fraction(str(float(share))) * experts + Fraction(1, 2)))


def _sizes(ffn_width: int) -> list[int]:
    """Divisors that leave at least two experts, ascending."""
    return [n for n in range(1, ffn_width // 2 + 1) if ffn_width % n == 0]


def _next_to(value: int, ascending: list[int]) -> tuple[int, ...]:
    below = [n for n in ascending if n < value]
    above = [n for n in ascending if n > value]
    return (*below[-1:], *above[:1])
