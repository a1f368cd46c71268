"""Differences between two measurements: they are made here alone, and only of two made alike.

Two losses compare in nats per token if the same token ids were scored in the same windows. Losses
of two tokenizers on the same whole text compare in bits per byte alone, and without an error,
because their windows do not pair. Scores of a task compare if it was asked with the same settings.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dotmoe.common.errors import UserError
from dotmoe.common.files import Values

_REMEDY = "Measure both by one command, with --against."
_OF_A_TASK = (
    "shots",
    "harness",
    "limit",
    "chat_template",
    "chat_answer",
    "repetition_penalty",
    "data",
)
"""Settings of a task, in its `identity`, that change the questions or how they are asked."""


class IncomparableError(UserError):
    """Two measurements that were not made alike; the message says in what, and what to do."""


def difference(result: Values, other: Values) -> tuple[float, float | None]:
    """How far the loss of a perplexity result is above another's, in nats per token, and its error.

    The error is the standard error over paired windows; None if there are fewer than two windows,
    or a result is of a version that did not keep their losses.

    Raises:
        IncomparableError: They were not measured on the same tokens in the same windows. Results of
            a version without `ids_sha256` are compared by the names of the text and the counts.
    """
    has_ids = _both_have("ids_sha256", result, other)
    if _is_tokenised_otherwise(result, other):
        raise IncomparableError(
            "losses per token of two tokenizers do not compare. Compare bits per byte."
        )
    _require_equal("in windows of {:,} tokens", result["window"], other["window"])
    _require_equal("over {:,} tokens", result["tokens"], other["tokens"])
    if not has_ids:
        _require_equal("on {}", _names(result), _names(other))
    elif result["ids_sha256"] != other["ids_sha256"]:
        raise IncomparableError(
            "losses on other tokens do not compare: the texts differ, or two tokenizers read the "
            "beginning of one. Leave --max-tokens out, and measure both by one command."
        )
    change = result["loss"] - other["loss"]
    ours, theirs = (each.get("window_losses", ()) for each in (result, other))
    if len(ours) != len(theirs):
        return change, None
    return change, error_over([a - b for a, b in zip(ours, theirs, strict=True)], scored_in(result))


def times_perplexity(result: Values, other: Values) -> float | None:
    """How many times another's perplexity a perplexity is; None if the two do not compare."""
    try:
        change, _ = difference(result, other)
    except IncomparableError:
        return None
    return math.exp(change)


def shown_difference(result: Values, other: Values, form: str = "+.4f") -> tuple[str, str]:
    """A difference of losses as the cell of a table, and a sentence to put below the table.

    The sentence says why the cell is in bits per byte, or a dash; it is empty for one in nats.
    """
    if _is_tokenised_otherwise(result, other):
        change = result["bits_per_byte"] - other["bits_per_byte"]
        sentence = "Two tokenizers read the text: they compare in bits per byte, without an error."
        return f"{change:{form}} bits per byte", sentence
    try:
        return nats_with_error(*difference(result, other), form), ""
    except IncomparableError as error:
        return "-", f"No difference: {error}"


def _is_tokenised_otherwise(result: Values, other: Values) -> bool:
    """Whether two tokenizers have read one text, as a whole."""
    if not _both_have("text_sha256", result, other):
        return False
    is_same_text = bool(result["text_sha256"] == other["text_sha256"])
    return is_same_text and bool(result["ids_sha256"] != other["ids_sha256"])


def _both_have(name: str, result: Values, other: Values) -> bool:
    return result.get(name) is not None and other.get(name) is not None


def _require_equal(what: str, ours: Any, theirs: Any) -> None:
    if ours != theirs:
        raise IncomparableError(
            f"a loss {what.format(ours)} and one {what.format(theirs)} do not compare. {_REMEDY}"
        )


def _names(result: Values) -> str:
    return ", ".join(Path(text).name for text in result.get("text", ()))


def error_over(values: Sequence[float], weights: Sequence[float]) -> float | None:
    """Standard error of the weighted mean of independent values; None for fewer than two."""
    number = len(values)
    if number < 2:
        return None
    total = sum(weights)
    mean = sum(v * w for v, w in zip(values, weights, strict=True)) / total
    squares = sum((w * (v - mean)) ** 2 for v, w in zip(values, weights, strict=True))
    return math.sqrt(number / (number - 1) * squares) / total


def error_of_mean(values: Sequence[float]) -> float | None:
    """Standard error of the mean of values that all count alike; None for fewer than two."""
    return error_over(values, [1 for _ in values])


def scored_in(result: Values) -> list[int]:
    """Number of scored tokens in each window: all but the first of a window."""
    windows = len(result.get("window_losses", ()))
    if not windows:
        return []
    in_a_full_one = result["window"] - 1
    all_but_last = [in_a_full_one] * (windows - 1)
    return [*all_but_last, result["tokens"] - sum(all_but_last)]


def nats_with_error(value: float, stderr: float | None, form: str) -> str:
    """A loss and its standard error; a difference (form `+`) within two errors is inconclusive."""
    if stderr is None:
        return f"{value:{form}}"
    shown = f"{value:{form}} ± {stderr:{form.lstrip('+')}}"
    is_inconclusive = form[0] == "+" and abs(value) <= 2 * stderr and stderr > 0
    return f"{shown} (inconclusive)" if is_inconclusive else shown


def require_asked_alike(task: Values, other: Values) -> None:
    """Raise `IncomparableError` unless a task was asked of two models with the same settings.

    `task` and `other` are results of one task. Each of the settings is compared, and the number of
    tokens at which requests are cut off. Results of a version that did not record them pass.
    """
    ours, theirs = (each.get("identity", {}) for each in (task, other))
    for name in _OF_A_TASK:
        if name in ours and name in theirs and ours[name] != theirs[name]:
            setting = name.replace("_", " ")
            if name != "data":
                setting += f" ({ours[name]} and {theirs[name]})"
            raise IncomparableError(f"asked with other {setting}. {_REMEDY}")
    cut, cut_too = (each.get("model", {}).get("context") for each in (task, other))
    if None not in (cut, cut_too) and cut != cut_too:
        raise IncomparableError(
            f"requests are cut off at {cut:,} and {cut_too:,} tokens. {_REMEDY}"
        )


def score_difference(score: Values, other: Values) -> tuple[float, float | None]:
    """How far a score is above another of the same task, and the standard error over pairs.

    The error is as if both were independent if not both kept their answers to the same questions.
    `require_asked_alike` says whether the two may be compared.
    """
    change = score["value"] - other["value"]
    ours, theirs = (each.get("per_question") or () for each in (score, other))
    if ours and len(ours) == len(theirs):
        gains = [a - b for a, b in zip(ours, theirs, strict=True)]
        return change, error_of_mean(gains)
    errors = score["stderr"], other["stderr"]
    return change, None if None in errors else math.hypot(*errors)


def share_kept(average: Values, other: Values) -> Values:
    """Share that an average is of another one: `of_all`, and `above_guessing` by both.

    Each is a share and its standard error, as if the two averages were independent.
    """

    def share(least: float | None) -> tuple[float, float | None] | None:
        if least is None or other["value"] <= least:
            return None
        value, whole = average["value"] - least, other["value"] - least
        errors = average["stderr"], other["stderr"]
        if None in errors:
            return value / whole, None
        return value / whole, math.hypot(errors[0], errors[1] * value / whole) / whole

    return {"of_all": share(0.0), "above_guessing": share(average["chance"])}
