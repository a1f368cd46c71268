"""What an analysis found, in a few lines for a person."""

from collections.abc import Callable
from itertools import combinations
from statistics import mean
from typing import Any

Values = dict[str, Any]


def headlines(name: str, values: Values) -> list[str]:
    """The figures that matter most of an analysis, as sentences.

    Args:
        name: Of the analysis.
        values: What it found.
    """
    return _SPEAKERS[name](values)


def _utilisation(values: Values) -> list[str]:
    spread = [layer["coefficient_of_variation"] for layer in values["statistics"]]
    most = max(layer["max_over_mean"] for layer in values["statistics"])
    least = min(layer["min_over_mean"] for layer in values["statistics"])
    dead = sum(len(layer["dead_experts"]) for layer in values["statistics"])
    line = (
        f"coefficient of variation of the load {min(spread):.2f} to {max(spread):.2f} by layer; "
        f"busiest expert {most:.2f} times its layer's mean, idlest {least:.2f}; {dead} dead"
    )
    return [line, *(f"warning: {warning}" for warning in values["warnings"])]


def _overlap(values: Values) -> list[str]:
    pairs = list(combinations(range(len(values["layers"])), 2))
    if not pairs:
        return ["one split layer, so there is nothing to compare"]
    similar = {pair: values["similarity_LL"][pair[0]][pair[1]] for pair in pairs}
    nmi = mean(values["top1_nmi_LL"][a][b] for a, b in pairs)
    a, b = max(similar, key=lambda pair: similar[pair])
    return [
        f"routing above chance shared by two layers: mean {mean(similar.values()):.3f}, most "
        f"{similar[a, b]:.3f} (layers {values['layers'][a]} and {values['layers'][b]}); mutual "
        f"information of first experts {nmi:.3f} ({values['top1_nmi_shuffled']:.3f} if shuffled)"
    ]


def _outputs(values: Values) -> list[str]:
    random = values["random_split"]
    return [
        f"layer {values['layer']}, {len(values['points'])} outputs of {values['experts_shown']} "
        f"experts: silhouette {_number(values['silhouette'])}, nearest neighbour of the same "
        f"expert {100 * values['neighbour_agreement']:.0f} %; a random split of the same neurons: "
        f"{_number(random['silhouette'])}, {100 * random['neighbour_agreement']:.0f} %"
    ]


def _history(values: Values) -> list[str]:
    lines = [
        f"{len(values['steps'])} steps, kl {_number(values['kl'][0])} to "
        f"{_number(values['kl'][-1])}, ce {_number(values['ce'][0])} to {_number(values['ce'][-1])}"
    ]
    found = values["settling"]
    if found:
        lines.append(
            f"neurons that change their expert in a step: {100 * found['moved_most']:.2g} % at "
            f"most (step {found['moved_most_at']}), {100 * found['moved_last_tenth']:.2g} % in the "
            f"last tenth, {100 * found['moved_last']:.2g} % at the end; "
            f"{found['moves_per_neuron']:.1f} changes a neuron; soft/hard gap "
            f"{_number(found['soft_hard_gap_first'])} to {_number(found['soft_hard_gap_last'])}"
        )
    if values["kept_from_start"]:
        kept = values["kept_from_start"]
        lines.append(f"neurons still in the expert they started in: {100 * mean(kept):.0f} %")
    return lines


def _profile(values: Values) -> list[str]:
    shares = sorted(values["shares"].items(), key=lambda item: -item[1])
    parts = ", ".join(f"{part} {100 * share:.1f} %" for part, share in shares)
    return [
        f"{values['step_s']:.3f} s a step of {values['tokens_a_step']:,} tokens "
        f"({values['clock']}): {parts}",
        f"{', '.join(values['overhead_parts'])} add {100 * values['overhead']:.1f} % to the rest",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


_SPEAKERS: dict[str, Callable[[Values], list[str]]] = {
    "expert_utilisation": _utilisation,
    "routing_overlap": _overlap,
    "expert_outputs_tsne": _outputs,
    "alignment_history": _history,
    "overhead_profile": _profile,
}
