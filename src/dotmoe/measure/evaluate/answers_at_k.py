"""An export on held-out own answers at several k, which is set when it is loaded."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dotmoe.common.files import Values
from dotmoe.common.progress import Update, no_update
from dotmoe.common.tables import Table, millions, percent, table_of
from dotmoe.export.architectures import FORMATS
from dotmoe.export.record import ExportRecord
from dotmoe.measure.evaluate.difference import nats_with_error
from dotmoe.measure.evaluate.own_answers import (
    DenseStates,
    closeness_on,
    kind_shown,
    worse_set,
)
from dotmoe.models.load import load_weights
from dotmoe.models.targets import TARGETS
from dotmoe.text.answers import ALIKE, OTHERS, OwnAnswers

_OF_A_POINT = ("kl", "kl_stderr", "top1", "top1_stderr", "like_fit")


def ks_of_answer_curve(num_experts: int, active_experts: int) -> tuple[int, ...]:
    """Values of k to measure, ascending: half of the model's own, its own, and three up to E."""
    left_out = num_experts - active_experts
    up = {active_experts + round(thirds * left_out / 3) for thirds in (0, 1, 2, 3)}
    return tuple(sorted(up | {max(1, active_experts // 2)}))


def curve_on_own_answers(
    taught: Mapping[str, DenseStates],
    folder: Path,
    own: OwnAnswers,
    measured: Mapping[str, Values],
    on_progress: Update = no_update,
) -> Values:
    """Closeness of an export on held-out answers at several k.

    `taught` are the dense model's states on them, `measured` the closeness at the export's own k,
    by the sets of answers. Empty if the format fixes k.
    """
    record = ExportRecord.load(folder)
    if not record.active_experts_editable:
        return {}
    known_TD = next(iter(taught.values())).hidden[0]
    model: Any = load_weights(folder, known_TD.dtype).to(known_TD.device)
    layers = range(record.first_dense_layers, record.num_layers)
    ks = ks_of_answer_curve(record.num_experts, record.active_experts)
    points = list[Values]()
    for active in ks:
        closeness = measured
        if active != record.active_experts:
            FORMATS[record.format].run_active_experts(model, layers, active)
            closeness = closeness_on(taught, model, own)
        points.append(_point(record, active, closeness))
        on_progress(len(points), len(ks), f"k = {active}")
    return {
        "active_experts": record.active_experts,
        "num_experts": record.num_experts,
        "key": record.active_experts_key,
        "target": record.target,
        "points": points,
    }


def _point(record: ExportRecord, active: int, closeness: Mapping[str, Values]) -> Values:
    share, parameters = record.active_at(active)
    return {
        "active_experts": active,
        "active_fraction": share,
        "active_parameters": parameters,
        **{
            kind: {name: values[name] for name in _OF_A_POINT if name in values}
            for kind, values in closeness.items()
        },
    }


def curve_in_short(curve: Values) -> str:
    """One sentence: how often the top token is the dense model's at each k."""
    parts = (
        f"{percent(worse_set(_sets_in(point))['top1'])} at {_shown_k(curve, point)}"
        for point in curve["points"]
    )
    return (
        f"Top token as the dense model's on held-out answers, by {curve['key']} at load time: "
        f"{', '.join(parts)} of {curve['num_experts']}."
    )


def curve_table_of_answers(curve: Values) -> Table:
    """Table of an export on held-out answers at several k."""
    whole = TARGETS[curve.get("target", "ffn")].whole  # measurements of other versions lack it
    columns: dict[str, Callable[[Values], str]] = {
        "k": partial(_shown_k, curve),
        f"of the {whole}": lambda point: percent(point["active_fraction"]),
        "parameters for a token": lambda point: millions(point["active_parameters"]),
    }
    for kind, values in _sets_in(curve["points"][0]).items():
        prompts = kind_shown(kind, values)
        columns[f"KL, {prompts}"] = partial(_shown_kl, kind)
        columns[f"same top token, {prompts}"] = partial(_shown_top1, kind)
    return table_of(
        curve["points"],
        columns,
        title="Held-out answers at several k",
        note=f"k is `{curve['key']}`, set when the model is loaded. The weights were made for "
        f"k = {curve['active_experts']}. KL(dense || model) in nats per answer token.",
    )


def _sets_in(point: Values) -> Values:
    """Closeness at a point, by the sets of answers that there are."""
    return {kind: point[kind] for kind in (ALIKE, OTHERS) if kind in point}


def _shown_k(curve: Values, point: Values) -> str:
    active = point["active_experts"]
    return f"{active} (now)" if active == curve["active_experts"] else str(active)


def _shown_kl(kind: str, point: Values) -> str:
    return nats_with_error(point[kind]["kl"], point[kind]["kl_stderr"], ".3f")


def _shown_top1(kind: str, point: Values) -> str:
    return percent(point[kind]["top1"])
