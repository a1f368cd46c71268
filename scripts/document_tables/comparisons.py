"""Rows of a comparison of methods, as `dotmoe compare` writes them."""

import math
from collections.abc import Iterable
from typing import Any

from document_tables.cells import score
from document_tables.records import Nothing, Record
from dotmoe.pipeline.rows import Row, over_seeds


def compared(rows: Iterable[Any]) -> list[Any]:
    """Rows of a comparison, seeds merged, least loss first. Each has its method's `name`, the
    `dense` row, its perplexity `times` dense and with seeds their `spread`, `other_times` on the
    other text, the tasks' `score`, and its `way`: `pruned`, or router and weights.
    """
    merged = over_seeds(map(Row.from_record, rows))
    dense, *rest = (Record(row.to_record() | {"losses": [*row.losses]}) for row in merged)
    for row in rest:
        row["name"], row["dense"] = row.value.replace("dot_moe", "dotmoe"), dense
        row["score"] = score(row.tasks)
        row["times"] = math.exp(row.loss_above_dense)
        row["other_times"] = row.other_loss and math.exp(row.other_loss - dense.other_loss)
        losses = [math.exp(each) for each in row.losses or ()]
        row["spread"] = f"{min(losses):.2f} to {max(losses):.2f}" if len(losses) > 1 else Nothing()
        row["way"] = f"{row.router.split(',')[0]}_{row.weights}" if row.router else "pruned"
        if row.router == "own, not exportable":
            row["way"] = "true_frozen"
    return sorted(rest, key=lambda row: row.loss_above_dense)


def beside(rows: Iterable[Any], key: str, column: str) -> list[Any]:
    """Rows with the same `key` as one row, with a member for each value of `column`."""
    found: dict[str, Any] = {}
    for row in rows:
        found.setdefault(row[key], Record({key: row[key]}))[row[column]] = row
    return list(found.values())
