"""Rows of a comparison: which columns there are, seeds merged into one row, and their table."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import fmean
from typing import Any

from dotmoe.common.tables import Table, millions, percent, table_of
from dotmoe.measure.evaluate.difference import (
    IncomparableError,
    difference,
    error_of_mean,
    nats_with_error,
)
from dotmoe.text.answers import ALIKE, OTHERS

MATCHED = 0.01
"""Largest relative deviation of active parameters from the budget that is called matched."""
_OPTIONAL = ("other text", "KL, answers", "KL, other answers", "seeds", "budget", "shared")
"""Columns that are left out if no row has a value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Perplexity of a row's model on the text that all rows share; see `perplexity`."""

    loss: float
    """Mean nats per token."""
    loss_above_dense: float = 0.0
    """How far it is above that of the dense model, measured in the same windows."""
    loss_above_dense_stderr: float | None = None
    perplexity: float | None = None
    bits_per_byte: float | None = None
    stderr: float | None = None
    tokens: int | None = None
    window: int | None = None
    window_losses: Sequence[float] = ()
    text: Sequence[str] = ()
    ids_sha256: str | None = None
    other_loss: float | None = None
    """Loss on the text of another domain."""
    other_ids_sha256: str | None = None
    """Which tokens and windows of that text these are."""

    @classmethod
    def of(cls, result: Mapping[str, Any], dense: Mapping[str, Any]) -> "Measured":
        """The columns of a perplexity result, beside that of the dense model."""
        names = {each.name for each in fields(cls)}
        change, stderr = difference(dict(result), dict(dense))
        values = {name: value for name, value in result.items() if name in names}
        values |= {"loss_above_dense": change, "loss_above_dense_stderr": stderr}
        if "other" in result:
            other = result["other"]
            values["other_loss"] = other["loss"]
            values["other_ids_sha256"] = f"{other['ids_sha256']} by {other['window']}"
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of a comparison; a column is None where the row has no such value."""

    run: str = ""
    """Name of its run folder."""
    value: str
    """Name of its method."""
    router: str | None = None
    """Where its router comes from: own, ridge or random."""
    trained: str | None = None
    """What was trained before any finetuning; None for a pruned model without training."""
    weights: str | None = None
    """The weights: frozen, repaired or finetuned."""
    seed: int | None = None
    active_fraction: float | None = None
    """Share of the neurons that run for a token."""
    active_std: float | None = None
    """Its standard deviation over tokens, if it varies."""
    shared_fraction: float | None = None
    """Share of the neurons that always run."""
    parameters: int | None = None
    """Parameters that work on a token."""
    stored: int | None = None
    over_budget: float | None = None
    """Relative deviation of `parameters` from the budget."""
    steps: int | None = None
    text_tokens: int | None = None
    """Tokens that the run was given; what a stage reads repeatedly counts once."""
    finetune_tokens: int | None = None
    seconds: float | None = None
    measured: Measured
    kl_alike: float | None = None
    """KL(dense || model) in nats per token of held-out answers of the dense model, to prompts of
    the kinds that a fit reads."""
    kl_alike_stderr: float | None = None
    kl_others: float | None = None
    """The same for prompts of kinds that no fit reads."""
    kl_others_stderr: float | None = None
    losses: Sequence[float] = ()
    """Losses above the dense model of all seeds, in a row that merges them."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What only some rows have, as their runs record it: a split, or what pruning removed."""

    def to_record(self) -> dict[str, Any]:
        """The row as one flat object for JSON, without columns that are None or empty."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("measured", "losses", "details"):
            del own[name]
        flat = {**self.details, **own, **asdict(self.measured)}
        return {name: value for name, value in flat.items() if value is not None and value != ()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Row":
        """Inverse of `to_record`; of an older version's record, too."""
        of_measured = {each.name for each in fields(Measured)}
        own = {each.name for each in fields(cls)} - {"measured", "losses", "details"}
        others = record.keys() - own - of_measured
        return cls(
            **{name: record[name] for name in own & record.keys()},
            measured=Measured(**{name: record[name] for name in of_measured & record.keys()}),
            details={name: record[name] for name in others},
        )


def on_answers(closeness: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Columns of a row from the results of one model on held-out answers; see `on_own_answers`."""
    columns = dict[str, Any]()
    for kind in (ALIKE, OTHERS):
        if kind in closeness:
            columns[f"kl_{kind}"] = closeness[kind]["kl"]
            columns[f"kl_{kind}_stderr"] = closeness[kind]["kl_stderr"]
    return columns


def over_seeds(rows: Iterable[Row]) -> list[Row]:
    """Rows with the seeds of a run merged: means, and every seed's `losses` above dense."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault((row.value, row.router, row.trained, row.weights), []).append(row)
    return [_merged(alike) for alike in groups.values()]


def _merged(alike: Sequence[Row]) -> Row:
    """One row of several seeds: the perplexity is that of the mean loss, counts are rounded."""
    measured = replace(alike[0].measured, **_means([row.measured for row in alike]))
    if all(row.measured.window_losses for row in alike):
        windows = zip(*(row.measured.window_losses for row in alike), strict=True)
        measured = replace(measured, window_losses=[fmean(each) for each in windows])
    measured = replace(measured, perplexity=math.exp(measured.loss))
    losses = [row.measured.loss_above_dense for row in alike]
    means = _means(alike)
    means.pop("seed", None)
    return replace(alike[0], **means, measured=measured, losses=losses)


def _means(alike: Sequence[Any]) -> dict[str, Any]:
    """Means of all fields that are numbers in each of these dataclasses, of one type."""
    means = dict[str, Any]()
    for each in fields(alike[0]):
        values = [getattr(one, each.name) for one in alike]
        if all(isinstance(value, int | float) for value in values):
            mean = fmean(values)
            means[each.name] = round(mean) if isinstance(values[0], int) else mean
    return means


Columns = dict[str, Callable[[Row], str | None]]
"""Cells of each column, by its heading."""


def table(summary: Mapping[str, Any], *, brief: bool = False) -> Table:
    """The table of a comparison, seeds merged into one row; `brief`: what fits 80 columns."""
    rows = over_seeds(map(Row.from_record, summary["rows"]))
    columns = _columns(rows)
    note = " ".join(_notes(summary, rows))
    if not brief:
        return table_of(rows, columns, words=[*columns].index("active"), note=note)
    chosen: Columns = {"method": lambda row: f"{row.value}\n{_how(row) or ''}".rstrip()}
    for name in ("active", "perplexity", "nats above dense", "above the best"):
        chosen[name] = columns[name]
    made = table_of(rows, chosen, words=1, note=note)
    headings = [name.replace("above dense", "above\ndense") for name in chosen]
    cells = [[cell and cell.replace(" (", "\n(") for cell in row] for row in made.rows]
    return replace(made, columns=headings, rows=cells)


def _columns(rows: Sequence[Row]) -> Columns:
    """The columns of all rows, the first of which is the dense model."""
    dense, *others = rows
    alike = [row for row in others if row.measured.window == dense.measured.window]
    best = min(alike, key=lambda row: row.measured.loss, default=dense)
    columns: Columns = {
        "method": lambda row: row.value,
        "how": _how,
        "active": _active,
        "perplexity": lambda row: _shown(row.measured.perplexity, "{:.2f}".format),
        "bits per byte": lambda row: _shown(row.measured.bits_per_byte, "{:.3f}".format),
        "nats above dense": lambda row: _above(row, dense),
        "above the best": lambda row: _above(row, best),
        "other text": lambda row: _on_other_text(row, dense),
        "KL, answers": lambda row: _kl(row.kl_alike, row.kl_alike_stderr),
        "KL, other answers": lambda row: _kl(row.kl_others, row.kl_others_stderr),
        "seeds": spread,
        "active parameters": lambda row: _shown(row.parameters, millions),
        "stored": lambda row: _shown(row.stored, millions),
        "budget": lambda row: _shown(row.over_budget, _budget),
        "shared": lambda row: _shown(row.shared_fraction or None, percent),
        "steps": lambda row: _shown(row.steps, "{:,}".format),
        "tokens": lambda row: _shown(row.text_tokens, "{:,}".format),
        "seconds": lambda row: _shown(row.seconds, "{:.0f}".format),
    }
    return {
        name: cell
        for name, cell in columns.items()
        if name not in _OPTIONAL or any(map(cell, rows))
    }


def said_of_comparison(summary: Mapping[str, Any], out: str) -> tuple[Table, str, str]:
    """What is shown of a comparison: its table, what it was measured on, and where the rest is."""
    text = f"{', '.join(summary['text'])}: {summary['protocol']}"
    files = f"all columns are in compare.md in {out}, beside compare.json and the runs"
    return table(summary, brief=True), text, files


def _notes(summary: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """Sentences below the table."""
    dense, *others = rows
    notes = list[str]()
    if other := summary.get("other_text"):
        notes.append(f"Other text, perplexity: {', '.join(other)}.")
    if dense.measured.window_losses:  # not in records of an earlier version
        over = "windows and seeds" if any(len(row.losses) > 1 for row in rows) else "windows"
        notes.append(f"±: one standard error, over {over}; inconclusive: within two.")
    if any(row.kl_alike is not None for row in others):
        notes.append(
            "KL: from the dense model, in nats per token of its own held-out answers, to prompts "
            "as in the fit and to other prompts."
        )
    for row in others:
        if row.measured.window != dense.measured.window:
            notes.append(f"{row.run} is measured in windows of {row.measured.window}, its context.")
    for name, why in summary.get("left_out", {}).items():
        notes.append(f"{name} failed: {why.rstrip('.')}.")
    return notes


def _shown(value: Any, form: Callable[[Any], str]) -> str | None:
    """A formatted value; None if there is none."""
    return None if value is None else form(value)


def _kl(kl: float | None, stderr: float | None) -> str | None:
    return None if kl is None else nats_with_error(kl, stderr, ".3f")


def _on_other_text(row: Row, dense: Row) -> str | None:
    """Perplexity on the other text; none if the dense model's is of other tokens or windows."""
    loss = row.measured.other_loss
    if loss is None or row.measured.other_ids_sha256 != dense.measured.other_ids_sha256:
        return None
    return f"{math.exp(loss):.2f}"


def _budget(over: float) -> str:
    return "matched" if abs(over) <= MATCHED else f"{100 * over:+.0f} %"


def _how(row: Row) -> str | None:
    """How a row was made: `own router, linear, router and experts trained, repaired`."""
    words = list[str]()
    if row.router:
        kind, comma, rest = row.router.partition(",")
        words.append(f"{kind} router{comma}{rest}")
    if row.trained and row.trained != "nothing":
        words.append(f"{row.trained} trained")
    if row.weights:
        words.append(row.weights)
    return ", ".join(words) or None


def _above(row: Row, other: Row) -> str | None:
    """How far the loss of a row is above another's, with the error over paired windows and seeds.

    None of the row itself, and of one that was measured in other windows.
    """
    if row is other:
        return None
    try:
        change, stderr = difference(asdict(row.measured), asdict(other.measured))
    except IncomparableError:
        return None
    if stderr is not None:
        of_seeds = [error_of_mean(each.losses) for each in (row, other)]
        stderr = math.hypot(stderr, *(error or 0.0 for error in of_seeds))
    return nats_with_error(change, stderr, "+.3f")


def _active(row: Row) -> str | None:
    """The active share of the neurons, with its standard deviation over tokens if there is one."""
    if row.active_fraction is None:
        return None
    share = percent(row.active_fraction)
    return share if row.active_std is None else f"{share} ± {percent(row.active_std)}"


def spread(row: Row) -> str | None:
    """Range of a row's loss above the dense model over its seeds; None for one seed."""
    if len(row.losses) < 2:
        return None
    return f"{min(row.losses):.3f} to {max(row.losses):.3f}"
