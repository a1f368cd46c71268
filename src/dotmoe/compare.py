"""Several methods on one model: the same budget, data, seed and measurement, side by side."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from dotmoe.baselines import METHODS, MethodName
from dotmoe.config import RunConfig
from dotmoe.errors import UserError
from dotmoe.files import write_json, write_text
from dotmoe.granularity import Granularity
from dotmoe.pipeline import convert
from dotmoe.progress import Progress
from dotmoe.provenance import provenance
from dotmoe.run_folder import RunFolder
from dotmoe.tables import Table, percent, table_of, to_markdown


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
class Point:
    """One conversion of a comparison or of a sweep."""

    name: str
    """Subfolder of the whole."""
    value: int | float | str
    """Of what changes: the method, or what is swept."""
    config: RunConfig
    trained: str = ""
    """What of it is trained, in words."""


def compare(config: CompareConfig, progress: Progress) -> dict[str, Any]:
    """Make every run that is not finished yet, and write `compare.json` and `compare.md`.

    Raises:
        UserError: As `points_of` and `convert`; runs that were finished before are kept.
    """
    summary = summary_of(config, points_of(config), _rows, progress)
    summary |= {
        "calibration_tokens": config.calibrate.calibration_tokens,
        "tokens_a_step": config.align.batch_size * config.data.seq_len,
        "steps": config.baseline.router_steps,
    }
    write_summary(config.out, "compare", summary, [table(summary)])
    return summary


def table(summary: dict[str, Any]) -> Table:
    """The rows of a comparison."""
    columns: dict[str, Callable[[Any], str | None]] = {
        "method": lambda row: row["value"],
        "router": lambda row: row.get("router"),
        "trained": lambda row: row.get("trained"),
        "perplexity": lambda row: f"{row['perplexity']:.2f}",
        "nats above dense": lambda row: f"{row['loss_above_dense']:.3f}",
        "active": lambda row: percent(row["active_fraction"]),
        "shared": lambda row: percent(row["shared_fraction"]),
        "seconds": lambda row: f"{row['seconds']:.0f}" if row.get("seconds") else None,
    }
    return table_of(summary["rows"], columns, words=3)


def points_of(config: CompareConfig) -> list[Point]:
    """The runs of a comparison, in the order of its table.

    Raises:
        UserError: A method named twice, or no text to measure on that all runs share.
    """
    if len(set(config.methods)) < len(config.methods):
        raise UserError("methods names one of them twice. Name each once.")
    plain = plain_run(config)
    return [point for method in config.methods for point in _points_of(method, plain)]


def plain_run(config: RunConfig) -> RunConfig:
    """The config of a conversion that the config of a comparison or of a sweep holds.

    Raises:
        UserError: It names no text to measure on.
    """
    if not config.eval_text:
        raise UserError(
            "eval_text names no text. Runs are compared on one that none of them is trained on, "
            "the same for all: give --eval-text."
        )
    return RunConfig(**{field.name: getattr(config, field.name) for field in fields(RunConfig)})


def summary_of(
    config: RunConfig,
    points: list[Point],
    rows_of: Callable[[Point, dict[str, Any]], Iterable[dict[str, Any]]],
    progress: Progress,
) -> dict[str, Any]:
    """What a comparison and a sweep record: makes every run that is not finished yet.

    Args:
        config: The config that holds all runs.
        points: The runs; at least one.
        rows_of: Rows of a run, from its results.
        progress: Shows the progress.
    """
    rows: list[dict[str, Any]] = []
    for point in points:
        progress.log(f"{point.name}:")
        results = convert(point.config, progress).results
        dense = results["dense"]
        if not rows:
            whole = {"active_fraction": 1.0, "shared_fraction": 0.0}
            whole["parameters"] = results["parameters"]["dense"]
            rows.append({"run": "dense", "value": "dense", **whole, **measured(dense, dense)})
        rows.extend(rows_of(point, results))
    return {
        "origin": "measured",
        "model": config.model,
        "rows": rows,
        "text": dense["text"],
        "window": dense["window"],
        "protocol": dense["protocol"],
        "provenance": provenance(config.seed),
    }


def moe_row(point: Point, results: dict[str, Any]) -> dict[str, Any]:
    """What a run measured of its export."""
    split = Granularity(**results["granularity"])
    folder = RunFolder(Path(point.config.out))
    return {
        "run": point.name,
        "value": point.value,
        **asdict(split),
        "active_fraction": split.active_fraction,
        "shared_fraction": split.shared_size / split.ffn_width,
        "parameters": results["parameters"]["active"],
        "steps": results["steps"],
        "seconds": folder.seconds("calibrate", "align", "extract"),
        **measured(results["moe"], results["dense"]),
    }


def measured(result: dict[str, Any], dense: dict[str, Any]) -> dict[str, Any]:
    """A perplexity, and how far it is from the dense model's."""
    kept = {name: result[name] for name in ("perplexity", "loss", "tokens", "window")}
    return kept | {"loss_above_dense": result["loss"] - dense["loss"]}


def write_summary(out: str, name: str, summary: dict[str, Any], tables: list[Table]) -> None:
    """Write `NAME.json`, and `NAME.md` with the tables and the protocol below."""
    protocol = f"{', '.join(summary['text'])}: {summary['protocol']}\n"
    write_json(Path(out) / f"{name}.json", summary)
    write_text(Path(out) / f"{name}.md", "\n\n".join([*map(to_markdown, tables), protocol]))


def _points_of(method: MethodName, plain: RunConfig) -> Iterator[Point]:
    steps = plain.baseline.router_steps

    def point(variant: str, trained: str, config: RunConfig) -> Point:
        name = f"{method}-{variant}"
        config = replace(config, method=method, out=str(Path(plain.out) / name))
        return Point(name=name, value=method, trained=trained, config=config)

    # What a method does not read must not make it another run.
    options = replace(plain.baseline, router_steps=0)
    has_shared_expert = method in METHODS and METHODS[method].has_shared_expert
    if not has_shared_expert:
        options = replace(options, shared_experts=None)
    if method == "dot_moe":
        free = replace(plain, baseline=options, align=replace(plain.align, steps=0))
        yield point("untrained", "nothing", free)
        for variant, trained, learns in (
            ("router", "router", False),
            ("trained", "router and experts", True),
        ):
            if steps:
                align = replace(plain.align, steps=steps, learn_assignment=learns)
                yield point(variant, trained, replace(free, align=align))
        return
    for router in ("own", "ridge"):
        baseline = replace(options, split_router=router)
        yield point(router, "nothing", replace(plain, baseline=baseline))
    if steps and not has_shared_expert:
        baseline = replace(options, split_router="ridge", router_steps=steps)
        yield point("trained", "router", replace(plain, baseline=baseline))


def _rows(point: Point, results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of a run: what was exported, and what its method's own router would be worth."""
    row = moe_row(point, results) | {"trained": point.trained}
    router: str = point.config.baseline.split_router if point.value != "dot_moe" else "ridge"
    exact = results.get("moe_own_router")
    yield row | {"router": router if exact is None else "linear fit to own"}
    if exact is not None:
        own = measured(exact, results["dense"])
        yield row | own | {"router": "own, not exportable"}
