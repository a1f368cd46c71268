"""Sections on how it was trained: curves, and where a step's time goes."""

import shlex
from statistics import mean

from dotmoe.report.elements import Markup, figure, joined, paragraph, table
from dotmoe.report.plots import alignment_steps, overhead_shares
from dotmoe.report.result_files import Values
from dotmoe.report.sections.parts import Context, Missing, Part, Section
from dotmoe.report.words import percent

_NAMES = {
    "loss": "loss",
    "ce": "CE, nats",
    "kl": "KL, nats",
    "balance": "balance loss",
    "tau": "tau",
    "moved_fraction": "moved, share",
    "soft_hard_gap": "soft-hard gap",
    "marginal_error": "marginal error",
    "grad_norm": "gradient norm",
}


def alignment(context: Context) -> list[Part]:
    """Curves of the alignment, and what its analysis adds."""
    found = context.found
    steps = alignment_steps(found)
    if not steps:
        if found.kind == "finetune":
            return []
        said = paragraph("None: the start was extracted as it is.")
        return [Section(title="Alignment", body=said)]
    note = (
        "Faint: each step, or the mean of a few where there are many; strong: mean of the last "
        "twentieth of the steps. Each step has other text, so the losses scatter."
    )
    plot = context.plot("alignment", f"Alignment: losses, temperature, moved neurons. {note}")
    history = found.analyses.get("alignment_history")
    settled = Markup() if history is None else paragraph(_settled(history["values"]))
    return [_training("Alignment", steps, joined([plot, settled]))]


def recovery(context: Context) -> list[Part]:
    """Curves of recovery training; a conversion is told how to get them."""
    found = context.found
    if not found.recovery:
        if found.kind == "finetune":
            return []
        words = ["dotmoe", "finetune", context.run, f"{context.run}-finetuned"]
        return [
            Missing(
                what="recovery training, which makes up for a part of the loss",
                command=shlex.join(words),
            )
        ]
    plot = context.plot("recovery", "Recovery training: losses against steps.")
    return [_training("Recovery training", found.recovery, plot)]


def overhead(context: Context) -> list[Part]:
    """Shares of a step's time."""
    analysis = context.found.analyses.get("overhead_profile")
    if analysis is None:
        return []
    values, shares = analysis["values"], overhead_shares(analysis)
    rows = [(name, f"{100 * share:.1f}") for name, share in shares.items()]
    said = (
        f"{values['step_s']:.3f} s a step of {values['tokens_a_step']:,} tokens, mean of "
        f"{values['steps']} steps ({values['clock']} clock). What the method itself takes "
        f"({', '.join(values['overhead_parts'])}) adds {percent(values['overhead'])} to the rest."
    )
    body = [
        paragraph(said),
        context.plot("overhead_profile", f"{analysis['title']}."),
        table(("part of a step", "time, %"), rows, caption="The same in figures"),
    ]
    return [Section(title="Where a step's time goes", body=joined(body))]


def _settled(values: Values) -> str:
    """How the assignment settled; empty where it was not learned."""
    said, found, kept = [], values.get("settling"), values.get("kept_from_start")
    if found:
        said.append(
            f"In a step {100 * found['moved_first_tenth']:.2f} % of the neurons change their "
            f"expert in the first tenth of the steps, {100 * found['moved_last_tenth']:.2f} % in "
            "the last."
        )
    if kept:
        said.append(f"{percent(mean(kept))} end in the expert they started in.")
    return " ".join(said)


def _training(title: str, steps: list[Values], plot: Markup) -> Section:
    columns = {key: name for key, name in _NAMES.items() if key in steps[0]}
    shown = sorted({round(index * (len(steps) - 1) / 8) for index in range(9)})
    rows = [
        (str(steps[index]["step"]), *(figure(steps[index].get(key)) for key in columns))
        for index in shown
    ]
    seconds = sum(step.get("seconds") or 0.0 for step in steps)
    body = [
        paragraph(f"{len(steps):,} steps, {seconds:,.0f} s in all."),
        plot,
        table(("step", *columns.values()), rows, caption="Single steps of the same run", words=0),
    ]
    return Section(title=title, body=joined(body))
