"""The section on the experts: how often each runs, which layers route alike, what they write."""

import shlex
from itertools import combinations
from statistics import mean
from typing import Any

from dotmoe.report.elements import Markup, element, figure, joined, paragraph, table
from dotmoe.report.result_files import Values
from dotmoe.report.sections.parts import Context, Missing, Part, Section, side_by_side
from dotmoe.report.words import percent

_WHAT = {
    "expert_utilisation": "how often each expert runs, and experts that never do",
    "routing_overlap": "which layers route alike",
    "expert_outputs_tsne": "a map of what the experts write",
}

_OF_ALIGNMENT = {
    "alignment_history": "how the assignment settled",
    "overhead_profile": "where the time of an alignment step goes",
}

_STATISTICS = {
    "coefficient_of_variation": "coefficient of variation",
    "max_over_mean": "busiest / mean",
    "min_over_mean": "idlest / mean",
    "dead_experts": "dead experts",
    "always_on_experts": "always on",
    "entropy_normalised": "entropy / its maximum",
}


def experts(context: Context) -> list[Part]:
    """Whatever of the analyses of the experts is there."""
    analyses = context.found.analyses
    body: list[Markup] = []
    if "expert_utilisation" in analyses:
        body += _utilisation(context, analyses["expert_utilisation"])
    maps = [context.plot(name, _caption(analyses[name])) for name in _SAID if name in analyses]
    body.append(side_by_side(*maps))
    body += [paragraph(_SAID[name](analyses[name])) for name in _SAID if name in analyses]
    if not any(name in analyses for name in _WHAT):
        return []
    return [Section(title="The experts", body=joined(body))]


def analyses(context: Context) -> list[Part]:
    """Those that were not made, with one command for all."""
    found = context.found
    of_alignment = _OF_ALIGNMENT if found.alignment or found.kind == "finetune" else {}
    wanted = _WHAT | of_alignment
    lacking = [name for name in wanted if name not in found.analyses]
    if not lacking:
        return []
    only = [] if len(lacking) == len(wanted) else ["--only", *lacking]
    command = shlex.join(["dotmoe", "analyse", context.run, *only])
    return [Missing(what="; ".join(wanted[name] for name in lacking), command=command)]


def _overlap(analysis: Values) -> str:
    values = analysis["values"]
    pairs = list(combinations(range(len(values["layers"])), 2))
    if not pairs:
        return "One layer is split, so there is no routing to compare."
    shared = [values["similarity_LL"][a][b] for a, b in pairs]
    return (
        f"Two layers share {mean(shared):.3f} of their routing above chance on average, "
        f"{max(shared):.3f} at most, after the best matching of their experts: 1 would be the same "
        "routing under other names, 0 layers that know nothing of each other."
    )


def _outputs(analysis: Values) -> str:
    values, random = analysis["values"], analysis["values"]["random_split"]
    return (
        f"{len(values['points']):,} outputs of {values['experts_shown']} of the "
        f"{values['num_experts']} experts of layer {values['layer']}. In all their dimensions the "
        f"nearest neighbour of an output is of the same expert for "
        f"{percent(values['neighbour_agreement'])} of them (by chance "
        f"{percent(values['neighbour_chance'])}; a random split of the same neurons: "
        f"{percent(random['neighbour_agreement'])}); silhouette {figure(values['silhouette'])} "
        f"(random split: {figure(random['silhouette'])}; from -1 to 1; above 0: told apart)."
    )


_SAID = {"routing_overlap": _overlap, "expert_outputs_tsne": _outputs}
"""What a map is to say in words."""


def _utilisation(context: Context, analysis: Values) -> list[Markup]:
    values = analysis["values"]
    warnings = [str(warning) for warning in values.get("warnings", ())]
    body = [
        element("ul", *(element("li", warning) for warning in warnings), class_="warning")
        if warnings
        else paragraph("No sign of collapse: no expert is dead, always on, or far too busy.")
    ]
    body.append(context.plot("expert_utilisation", _caption(analysis)))
    rows = [
        (str(row["layer"]), *(_load(row[key]) for key in _STATISTICS))
        for row in values["statistics"]
    ]
    body.append(
        table(
            ("layer", *_STATISTICS.values()),
            rows,
            caption=f"How evenly tokens are spread over the experts, {analysis['tokens']:,} tokens",
            words=0,
        )
    )
    return body


def _load(value: Any) -> str:
    """A figure, or how many experts a list names."""
    return str(len(value)) if isinstance(value, list) else figure(value)


def _caption(analysis: Values) -> str:
    return f"{analysis['title']}, on {analysis['tokens']:,} tokens."
