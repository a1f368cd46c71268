"""How much a text repeats itself: n-grams, and loops."""

from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_PERIOD = 64
"""Tokens of the longest block whose repetition is found."""

FEWEST_ROUNDS = 3
"""A block that stands so many times in a row is a loop."""

SHORTEST_LOOP = 12
"""Tokens of the shortest loop: shorter ones are indentation, dots and dashes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repetition:
    """Figures of a set of continuations, 0 to 1 each."""

    loop_share: float
    """Share of all generated tokens that lie in a loop."""
    looping: float
    """Share of continuations that end in a loop."""
    rep_2: float
    """rep-2: share of a continuation's 2-grams that stood in it before, mean over continuations."""
    rep_3: float
    rep_4: float
    diversity: float
    """(1 - rep-2) (1 - rep-3) (1 - rep-4), of the means."""
    distinct_1: float
    """distinct-1: different tokens of all continuations together over their number."""
    distinct_2: float
    """The same of 2-grams."""
    tokens: int
    """Tokens generated."""


def loop_tokens(tokens: Sequence[int]) -> list[bool]:
    """Whether each token lies in a loop.

    A loop is a stretch of `SHORTEST_LOOP` tokens or more in which each token equals the one p
    places before it, and which is `FEWEST_ROUNDS` times p long or longer, for some period p up to
    `LONGEST_PERIOD`.

    Example:
        >>> sum(loop_tokens([5, 6, 7] + [1, 2, 3, 4] * 3))
        12
    """
    inside = [False] * len(tokens)
    for period in range(1, min(LONGEST_PERIOD, len(tokens) // FEWEST_ROUNDS) + 1):
        start = 0
        for place in range(period, len(tokens) + 1):
            if place < len(tokens) and tokens[place] == tokens[place - period]:
                continue
            if place - start >= max(SHORTEST_LOOP, FEWEST_ROUNDS * period):
                inside[start:place] = [True] * (place - start)
            start = place - period + 1
    return inside


def rep_n(tokens: Sequence[int], n: int) -> float:
    """1 - |different n-grams| / |n-grams| of one continuation; 0 where it has none.

    Example:
        >>> rep_n([1, 2, 1, 2, 1], 2)
        0.5
    """
    grams = _grams(tokens, n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct_n(texts: Sequence[Sequence[int]], n: int) -> float:
    """Different n-grams of all continuations together, over their number; 1 where there are none.

    Example:
        >>> distinct_n([[1, 2], [1, 3]], 1)
        0.75
    """
    grams = [gram for tokens in texts for gram in _grams(tokens, n)]
    return len(set(grams)) / len(grams) if grams else 1.0


def repetition(texts: Sequence[Sequence[int]]) -> Repetition:
    """Every figure of a set of continuations, one or more, given as token ids."""
    loops = [loop_tokens(tokens) for tokens in texts]
    total = sum(map(len, texts))
    means = {n: sum(rep_n(tokens, n) for tokens in texts) / len(texts) for n in (2, 3, 4)}
    return Repetition(
        loop_share=sum(map(sum, loops)) / max(1, total),
        looping=sum(bool(inside and inside[-1]) for inside in loops) / len(texts),
        rep_2=means[2],
        rep_3=means[3],
        rep_4=means[4],
        diversity=(1 - means[2]) * (1 - means[3]) * (1 - means[4]),
        distinct_1=distinct_n(texts, 1),
        distinct_2=distinct_n(texts, 2),
        tokens=total,
    )


def _grams(tokens: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
