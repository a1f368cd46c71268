"""Sections on quality: perplexity, benchmark tasks, other k."""

import shlex
from collections.abc import Iterator
from typing import Any

from dotmoe.report.elements import Markup, code, figure, joined, paragraph, table
from dotmoe.report.result_files import Values
from dotmoe.report.sections.parts import Context, Missing, Part, Section
from dotmoe.report.task_scores import Score, main_scores, scores_of
from dotmoe.report.words import percent


def perplexity(context: Context) -> list[Part]:
    """Every model on the held-out text of the run, and other texts that were measured on."""
    models = context.found.models
    dense = models["dense"]
    own = context.found.results.get("moe_own_router")
    if own is not None:
        models["under the router of the method itself"] = own
    body = [
        table(
            ("model", "perplexity", f"nats a {dense['unit']}", "above dense", "bits a byte"),
            [
                (
                    name,
                    f"{result['perplexity']:.3f}",
                    f"{result['loss']:.4f}",
                    f"{result['loss'] - dense['loss']:+.4f}",
                    figure(result.get("bits_per_byte")),
                )
                for name, result in models.items()
            ],
            caption=f"Perplexity per {dense['unit']}; lower is better",
        ),
        _protocol(dense),
    ]
    other = context.found.measured.get("perplexity")
    if other is not None:
        for label, result in ({"": other} if "perplexity" in other else other).items():
            if not isinstance(result, dict) or "perplexity" not in result:
                continue
            name = {"against": "dense or compared model", "model": "this model"}.get(label, "")
            said = f"{name}: perplexity {result['perplexity']:.3f}, {result['loss']:.4f} nats."
            body += [paragraph(said.removeprefix(": ")), _protocol(result)]
    return [Section(title="Perplexity", body=joined(body))]


def tasks(context: Context) -> list[Part]:
    """Scores with standard errors, and what must be known of them."""
    found = context.found
    words = ["dotmoe", "evaluate", context.run, "--against", context.dense, "--tasks", "paper"]
    missing = Missing(
        what="benchmark tasks, dense model beside this one", command=shlex.join(words)
    )
    scores = scores_of(found)
    if not scores:
        return [missing]
    body = [
        context.plot("tasks", "Accuracy on each task, with one standard error, beside guessing."),
        _scores_table(scores, found.name),
        *(paragraph(note, class_="note") for note in _notes(context, scores)),
    ]
    parts: list[Part] = [Section(title="Benchmark tasks", body=joined(body))]
    return parts if found.tasks["against"] else [*parts, missing]


def active_experts(context: Context) -> list[Part]:
    """Perplexity of the same checkpoint at other k."""
    curve = context.found.measured.get("curve")
    if curve is None:
        return [
            Missing(
                what="perplexity at other k",
                command=context.evaluation("--curve", "--text", *context.texts),
            )
        ]
    rows = [
        (
            f"{point['active_experts']}"
            + " (as it is now)" * (point["active_experts"] == curve["active_experts"])
            + " (all)" * (point["active_experts"] == curve["num_experts"]),
            percent(point["active_fraction"]),
            f"{point['active_parameters']:,}",
            percent(point["active_parameters"] / curve["dense_parameters"]),
            f"{point['perplexity']:.3f}",
            f"{point['loss_above_all_experts']:+.4f}",
        )
        for point in curve["points"]
    ]
    columns = ("k", "of the FFN", "active parameters", "of all", "perplexity", "nats above dense")
    body = [
        paragraph(
            "k is how many experts run for a token. It can be changed in the finished checkpoint "
            "without any training: ",
            code(shlex.join(["dotmoe", "edit", context.run, "--active-experts", "K"])),
        ),
        context.plot(
            "active_experts", "Perplexity against the share of the parameters that work on a token."
        ),
        table(columns, rows, caption=f"Perplexity per {curve['unit']} at several k"),
        _protocol(curve),
    ]
    return [Section(title="Other numbers of active experts", body=joined(body))]


def word_perplexity(context: Context) -> list[Part]:
    """Perplexity a word at several windows; nothing is said where nobody asked for it."""
    result = context.found.measured.get("word_perplexity")
    if result is None:
        return []
    sides = [result["against"]] if "against" in result else []
    rows = [
        (str(side["name"]), f"{row['window']:,}", f"{row['word_perplexity']:.3f}")
        for side in [*sides, result["model"]]
        for row in side["windows"]
    ]
    shown = table(
        ("model", "window, tokens", "perplexity a word"),
        rows,
        caption="Perplexity a word, by rolling log-likelihood",
    )
    return [Section(title="Perplexity a word", body=shown)]


def _scores_table(scores: list[Score], name: str) -> Markup:
    columns = ("task", "metric", "shots", "questions", "guessing", "dense", name, "difference")
    return table(
        columns,
        [tuple(_cells(score)) for score in scores],
        caption="Per cent, ± one standard error; bold differences exceed two of them",
        words=2,
    )


def _cells(score: Score) -> Iterator[str]:
    factor, unit = (100.0, ".1f") if score.is_share else (1.0, ".3f")
    yield score.task
    yield score.metric
    yield str(score.shots)
    yield f"{score.questions:,}"
    yield "-" if score.chance is None else f"{100 * score.chance:.0f}"
    for label in ("against", "model"):
        yield _with_error(score.values.get(label), score.errors.get(label), factor, unit)
    if len(score.values) < 2:
        yield "-"
        return
    change = f"{factor * (score.values['model'] - score.values['against']):+{unit}}"
    yield Markup(f"<strong>{change}</strong>") if score.differs() else change


def _with_error(value: float | None, error: float | None, factor: float, unit: str) -> str:
    if value is None:
        return "-"
    said = format(factor * value, unit)
    return said if error is None else f"{said} ± {factor * error:{unit}}"


def _notes(context: Context, scores: list[Score]) -> list[str]:
    near = [score.task for score in main_scores(scores) if score.is_near_chance("against")]
    notes = []
    if near:
        notes.append(
            "The dense model itself is within two standard errors of guessing, or below: "
            f"{', '.join(near)}. A score near guessing says nothing about the split."
        )
    said: dict[str, list[str]] = {}
    for label in ("against", "model"):
        for task, result in context.found.tasks[label].items():
            for note in result.get("notes", ()):
                tasks_of_note = said.setdefault(str(note), [])
                if task not in tasks_of_note:
                    tasks_of_note.append(task)
    notes += [f"{', '.join(names)}: {note}." for note, names in said.items()]
    first = next(iter(context.found.tasks["model"].values()))
    notes.append(f"Run by lm-evaluation-harness {_harness(first)}, on the exported checkpoint.")
    return notes


def _harness(result: Values) -> Any:
    return result.get("harness", {}).get("version", "")


def _protocol(result: Values) -> Markup:
    texts = ", ".join(str(text) for text in result.get("text", ()))
    return paragraph(f"Text: {texts}. {result['protocol']}", class_="note")
