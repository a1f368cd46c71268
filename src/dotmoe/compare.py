"""Several methods on one model: the same budget, data, seed and measurement, side by side."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from dotmoe.baselines import METHODS, MethodName
from dotmoe.config import RunConfig
from dotmoe.errors import UserError
from dotmoe.pipeline import convert
from dotmoe.progress import Progress
from dotmoe.run_folder import RunFolder, provenance, write_json, write_text
from dotmoe.tables import percent


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareConfig(RunConfig):
    """One model, one budget, several methods."""

    command: ClassVar[str] = "compare"

    methods: tuple[MethodName, ...] = ("dot_moe", *METHODS)
    """Methods to compare. Each is converted without training, once with its own router and once
    with a ridge-regressed one, and with `router_steps` also trained: `dot_moe` that many steps of
    alignment, the others their router as long on the same batches."""
    method: Annotated[Literal["dot_moe"], tyro.conf.Suppress] = "dot_moe"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One run of a comparison."""

    name: str
    """Subfolder of the comparison."""
    method: MethodName
    training: str
    """What of it is trained, in words."""
    config: RunConfig


def entries(config: CompareConfig) -> list[Entry]:
    """The runs of a comparison, in the order of its table.

    Raises:
        UserError: A method named twice, or no text to measure on that all runs share.
    """
    if len(set(config.methods)) < len(config.methods):
        raise UserError("methods names one of them twice. Name each once.")
    if not config.eval_text:
        raise UserError(
            "eval_text names no text. A comparison needs one that no method is trained on, the "
            "same for all: give --eval-text."
        )
    names = [field.name for field in dataclasses.fields(RunConfig)]
    plain = RunConfig(**{name: getattr(config, name) for name in names})
    return [entry for method in config.methods for entry in _entries_of(method, plain)]


def compare(config: CompareConfig, progress: Progress) -> dict[str, Any]:
    """Make every run that is not finished yet, and write `compare.json` and `compare.md`.

    Raises:
        UserError: As `entries` and `convert`; runs that were finished before are kept.
    """
    rows: list[dict[str, Any]] = []
    for entry in entries(config):
        progress.log(f"{entry.name}:")
        results = convert(entry.config, progress).results
        if not rows:
            rows.append(_row("dense", "dense", "-", "-", results["dense"], results["dense"]))
            rows[0] |= {"active_fraction": 1.0, "parameters": results["parameters"]["dense"]}
        rows.extend(_rows(entry, results))
    summary = {
        "origin": "measured",
        "model": config.model,
        "rows": rows,
        "protocol": results["dense"]["protocol"],
        "text": results["dense"]["text"],
        "calibration_tokens": config.calibrate.calibration_tokens,
        "tokens_a_step": config.align.batch_size * config.data.seq_len,
        "steps": config.baseline.router_steps,
        "provenance": provenance(config.seed),
    }
    out = Path(config.out)
    write_json(out / "compare.json", summary)
    write_text(out / "compare.md", as_markdown(summary))
    return summary


def as_markdown(summary: dict[str, Any]) -> str:
    """The table of a comparison, with its protocol below."""
    header = "| " + " | ".join(COLUMNS) + " |"
    lines = [header, "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in summary["rows"]]
    return "\n".join([*lines, "", f"{', '.join(summary['text'])}: {summary['protocol']}", ""])


COLUMNS = (
    "method",
    "router",
    "trained",
    "perplexity",
    "nats above dense",
    "active",
    "shared",
    "seconds",
)


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table as text, by `COLUMNS`."""
    seconds = row["seconds"]
    return [
        row["method"],
        row["router"],
        row["trained"],
        f"{row['perplexity']:.2f}",
        f"{row['loss_above_dense']:.3f}",
        percent(row["active_fraction"]),
        percent(row["shared_fraction"]),
        "-" if seconds is None else f"{seconds:.0f}",
    ]


def _entries_of(method: MethodName, plain: RunConfig) -> Iterator[Entry]:
    steps = plain.baseline.router_steps
    out = Path(plain.out)

    def entry(variant: str, training: str, config: RunConfig) -> Entry:
        name = f"{method}-{variant}"
        config = replace(config, method=method, out=str(out / name))
        return Entry(name=name, method=method, training=training, config=config)

    # What a method does not read must not make it another run.
    options = replace(plain.baseline, router_steps=0)
    has_shared_expert = method in METHODS and METHODS[method].has_shared_expert
    if not has_shared_expert:
        options = replace(options, shared_experts=None)
    if method == "dot_moe":
        free = replace(plain, baseline=options, align=replace(plain.align, steps=0))
        yield entry("untrained", "nothing", free)
        for variant, training, learns in (
            ("router", "router", False),
            ("trained", "router and experts", True),
        ):
            if steps:
                align = replace(plain.align, steps=steps, learn_assignment=learns)
                yield entry(variant, training, replace(free, align=align))
        return
    for router in ("own", "ridge"):
        baseline = replace(options, split_router=router)
        yield entry(router, "nothing", replace(plain, baseline=baseline))
    if steps and not has_shared_expert:
        baseline = replace(options, split_router="ridge", router_steps=steps)
        yield entry("trained", "router", replace(plain, baseline=baseline))


def _rows(entry: Entry, results: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of a run: what was exported, and what its method's own router would be worth."""
    dense, options = results["dense"], entry.config.baseline
    router: str = "ridge" if entry.method == "dot_moe" else options.split_router
    exact = results.get("moe_own_router")
    if exact is not None:
        router = "linear fit to own"
    common = {
        "run": entry.name,
        "active_fraction": _active_fraction(results["granularity"]),
        "shared_fraction": _shared_fraction(results["granularity"]),
        "parameters": results["parameters"]["active"],
        "steps": results["steps"],
        "seconds": RunFolder(Path(entry.config.out)).seconds("calibrate", "align", "extract"),
    }
    rows = [_row(entry.name, entry.method, router, entry.training, results["moe"], dense) | common]
    if exact is not None:
        name = "own, not exportable"
        rows.append(_row(entry.name, entry.method, name, entry.training, exact, dense) | common)
    return rows


def _row(
    run: str,
    method: str,
    router: str,
    trained: str,
    result: dict[str, Any],
    dense: dict[str, Any],
) -> dict[str, Any]:
    return {
        "run": run,
        "method": method,
        "router": router,
        "trained": trained,
        "perplexity": result["perplexity"],
        "loss": result["loss"],
        "loss_above_dense": result["loss"] - dense["loss"],
        "tokens": result["tokens"],
        "window": result["window"],
        "shared_fraction": 0.0,
        "seconds": None,
    }


def _active_fraction(split: dict[str, int]) -> float:
    active = split["shared_size"] + split["active_experts"] * split["expert_size"]
    return active / _width(split)


def _shared_fraction(split: dict[str, int]) -> float:
    return split["shared_size"] / _width(split)


def _width(split: dict[str, int]) -> int:
    return split["shared_size"] + split["num_experts"] * split["expert_size"]
