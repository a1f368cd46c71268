"""Perplexity against the number of experts that run, from one loaded model."""

from collections.abc import Callable, Sequence
from typing import Any

from dotmoe.data import Packed
from dotmoe.evaluate.perplexity import EvaluateConfig, PerplexityResult, packed_perplexity

RUNGS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
"""Shares of the experts at which a curve is measured unless told otherwise."""


def ladder(num_experts: int, active_experts: int) -> tuple[int, ...]:
    """Values of k for a curve: some shares of E, the model's own k, and E, ascending.

    Example:
        >>> ladder(48, 10)
        (6, 10, 12, 18, 24, 36, 48)
    """
    rungs = {max(1, round(share * num_experts)) for share in RUNGS}
    return tuple(sorted(rungs | {active_experts}))


def perplexity_by_active_experts(
    model: Any,
    tokenizer: Any,
    packed: Packed,
    config: EvaluateConfig,
    active_experts: Sequence[int],
    run_with: Callable[[int], None],
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[int, PerplexityResult]:
    """`packed_perplexity` at several k, on the same windows.

    Args:
        model: See `perplexity`.
        tokenizer: Its tokenizer.
        packed: The text.
        config: Window and batch size.
        active_experts: Values of k; the model is left with the last.
        run_with: Gives the model another k.
        on_progress: Told windows done and windows in all, over all k.
    """
    results: dict[int, PerplexityResult] = {}
    for active in active_experts:
        run_with(active)
        before = len(results)

        def update(done: int, total: int, before: int = before) -> None:
            if on_progress is not None:
                on_progress(before * total + done, len(active_experts) * total)

        results[active] = packed_perplexity(model, tokenizer, packed, config, update)
    return results
