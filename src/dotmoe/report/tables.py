"""Every table of results: one function each, for the terminal, the page and the documents."""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dotmoe.tables import Table, figure, percent, table_of

Values = Mapping[str, Any]

LABELS = ("against", "model")
"""The two sides of a measurement; the other model first, as in the paper's tables."""


def perplexity_table(models: Mapping[str, Values]) -> Table:
    """Perplexity of models on the same text.

    Args:
        models: Results by the name of the model; the first is what the others are compared with.
    """
    reference, first = next(iter(models.items()))
    unit, above = first["unit"], f"above {Path(reference).name}"
    columns: dict[str, Callable[[Any], str]] = {
        "model": lambda row: row[0],
        "perplexity": lambda row: f"{row[1]['perplexity']:.3f}",
        f"nats a {unit}": lambda row: f"{row[1]['loss']:.4f}",
        above: lambda row: f"{row[1]['loss'] - first['loss']:+.4f}",
        "bits a byte": lambda row: figure(row[1].get("bits_per_byte")),
    }
    if len(models) == 1:  # nothing to compare with
        del columns[above]
    return table_of(
        models.items(),
        columns,
        title=f"Perplexity per {unit}, windows of {first['window']:,}, {first['tokens']:,} tokens",
        note=_protocol(first),
    )


def word_table(result: Values) -> Table:
    """Perplexity a word of one model or two, at each window."""
    sides = [result[label] for label in LABELS if label in result]
    return table_of(
        [{"model": side["name"], **row} for side in sides for row in side["windows"]],
        {
            "model": lambda row: str(row["model"]),
            "window, tokens": lambda row: f"{row['window']:,}",
            "perplexity a word": lambda row: f"{row['word_perplexity']:.3f}",
            "words": lambda row: f"{row['words']:,}",
            "tokens": lambda row: f"{row['tokens']:,}",
        },
        title="Perplexity a word, by rolling log-likelihood",
        note=_protocol(result),
    )


def curve_table(curve: Values) -> Table:
    """Perplexity of an export at several k."""
    marks = {curve["active_experts"]: " (now)"}
    marks[curve["num_experts"]] = f" ({curve['all_experts']['model']})"
    return table_of(
        curve["points"],
        {
            "k": lambda point: f"{point['active_experts']}{marks.get(point['active_experts'], '')}",
            "of the FFN": lambda point: percent(point["active_fraction"]),
            "active parameters": lambda point: f"{point['active_parameters']:,}",
            "of all": lambda point: percent(point["active_parameters"] / curve["dense_parameters"]),
            "perplexity": lambda point: f"{point['perplexity']:.3f}",
            f"nats above k = {curve['num_experts']}": lambda point: (
                f"{point['loss_above_all_experts']:+.4f}"
            ),
        },
        title=f"Perplexity per {curve['unit']} at several k",
        note=_protocol(curve),
    )


def scores_table(
    scores: Iterable[Values], others: Iterable[Values], names: tuple[str, str]
) -> Table:
    """Benchmark tasks of a model, beside another one where that was measured.

    Args:
        scores: Rows of the model, from the `scores` of its task files.
        others: The same of the other model; may be empty.
        names: Of the other model, and of the model.
    """
    by_key = {(each["task"], each["metric"]): each for each in others}

    def other(score: Values) -> Values | None:
        return by_key.get((score["task"], score["metric"]))

    def change(score: Values) -> str | None:
        beside, factor = other(score), 100 if is_share(score) else 1
        if beside is None:
            return None
        return f"{factor * (score['value'] - beside['value']):+.3g}" + " *" * differ(score, beside)

    of_other = {names[0]: lambda score: _with_error(other(score))} if by_key else {}
    return table_of(
        scores,
        {
            "task": lambda score: score["task"],
            "metric": lambda score: score["metric"],
            "shots": lambda score: str(score["shots"]),
            "questions": lambda score: f"{score['questions']:,}",
            "guessing": lambda score: figure(score["chance"] and 100 * score["chance"], ".0f"),
            **of_other,
            names[1]: _with_error,
            **({"difference": change} if by_key else {}),
        },
        title="Benchmark tasks, per cent ± one standard error",
        note="guessing: evenly, or always the most frequent answer. *: the difference exceeds two "
        "standard errors.",
        words=2,
    )


def is_share(score: Values) -> bool:
    """Whether a score is a share of right answers, 0 to 1."""
    return score["metric"] in ("acc", "acc_norm", "exact_match")


def differ(score: Values, other: Values) -> bool:
    """Whether two scores differ by more than two standard errors, as if those were independent.

    Both models answer the same questions, so a difference may be overlooked.
    """
    error = math.hypot(score["stderr"] or math.inf, other["stderr"] or math.inf)
    return bool(abs(score["value"] - other["value"]) > 2 * error)


def is_near_chance(score: Values) -> bool:
    """Whether a score cannot be told from guessing, or is below it."""
    if score["chance"] is None or score["stderr"] is None:
        return False
    return bool(score["value"] - score["chance"] < 2 * score["stderr"])


def fidelity_table(result: Values) -> Table:
    """Closeness to the dense model before and after the head, and of each FFN."""
    places = {"before the LM head": result["before_head"], "logits": result["after_head"]}
    places |= {f"FFN output, layer {each['layer']}": each for each in result["ffn"]}
    return table_of(
        places.items(),
        {
            "place": lambda row: row[0],
            "cosine": lambda row: f"{row[1]['cosine']:.4f}",
            "MSE": lambda row: figure(row[1]["mse"]),
            "MSE / mean square": lambda row: f"{row[1]['relative_mse']:.4f}",
        },
        title=f"{result['name']} beside {result['against']}, {result['tokens']:,} tokens",
        note=f"KL {result['kl']:.4f} nats a token, same most likely token for "
        f"{percent(result['top1_agreement'])}. FFNs are fed with the dense input. "
        f"Text: {text_names(result)}.",
    )


def repetition_table(result: Values) -> Table:
    """How much of what each model writes repeats."""
    keys = {"in a loop": "loop_share", "end in a loop": "looping"}
    keys |= {f"rep-{n}": f"rep_{n}" for n in (2, 3, 4)}
    keys |= {f"distinct-{n}": f"distinct_{n}" for n in (1, 2)}
    rows = [
        [
            f"{side['name']}, {way}",
            *(f"{100 * side[way]['repetition'][key]:.1f}" for key in keys.values()),
        ]
        for way in ("greedy", "sampled")
        for side in (result[label] for label in LABELS if label in result)
    ]
    prompts = len(result["model"]["prompts"])
    title = f"Repetition in continuations of {prompts} prompts, per cent"
    return Table(title=title, columns=("model", *keys), rows=rows)


def origins_table(files: Mapping[str, Values]) -> Table:
    """Where each figure comes from: file, origin, time, commit, machine, seed."""
    made = ("time", "commit", "hardware", "seed")
    rows = [
        [f"6_evaluate/{name}.json", values.get("origin")]
        + [figure(values.get("provenance", {}).get(key)) for key in made]
        for name, values in files.items()
    ]
    columns = ("file", "origin", "time (UTC)", "commit", "hardware", "seed")
    return Table(title="Result files", columns=columns, rows=rows, words=6)


def text_names(result: Values) -> str:
    """Names of the texts that were measured on, without their folders."""
    return ", ".join(Path(str(text)).name for text in result.get("text", ()))


def _with_error(score: Values | None) -> str | None:
    if score is None:
        return None
    factor, form = (100, ".1f") if is_share(score) else (1, ".3f")
    error = "" if score["stderr"] is None else f" ± {factor * score['stderr']:{form}}"
    return f"{factor * score['value']:{form}}{error}"


def _protocol(result: Values) -> str:
    return f"Text: {', '.join(map(str, result.get('text', ())))}. {result.get('protocol', '')}"
