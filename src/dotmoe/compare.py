"""Several conversions of one model on the same text, side by side: of methods, or of one setting.

A comparison gives every method the same budget, data and seed; a sweep changes one thing of one
method. Each run is a run folder of its own, so that what was stopped goes on where it was, and one
with more runs makes only those.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import tyro

from dotmoe.align import AlignConfig
from dotmoe.baselines import METHODS, MethodName
from dotmoe.calibrate import CalibrateConfig, Start
from dotmoe.config import PruneRunConfig, RunConfig, finetune_recipe
from dotmoe.distributed import resolved_device
from dotmoe.errors import UserError, VerificationError
from dotmoe.files import write_json, write_text
from dotmoe.granularity import ExpertsConfig, Granularity, nearest_active_experts, resolve
from dotmoe.load import describe_dense
from dotmoe.models.family import DenseModel, num_parameters
from dotmoe.options import above, at_least, at_most
from dotmoe.pipeline import budget_of, convert, finetune, prune, split_of
from dotmoe.progress import Progress
from dotmoe.pruning import PRUNING, PruningName
from dotmoe.report import plots
from dotmoe.report.page import html_page
from dotmoe.report.sections import Block
from dotmoe.run_folder import RunFolder, provenance
from dotmoe.tables import Table, millions, percent, table_of, to_latex, to_markdown

Row = dict[str, Any]
Share = Annotated[float, above(0), at_most(1)]

_OWN = "own, not exportable"

MATCHED = 0.01
"""Share of the budget by which active parameters may differ from it and still be called matched."""

_SWEPT = {"experts": "E", "active": "aligned at", "start": "start"}
"""What can be swept, and what a table calls it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareConfig(RunConfig):
    """One model, one budget, several methods."""

    command: ClassVar[str] = "compare"

    methods: tuple[MethodName | PruningName | Literal["all"], ...] = ("dot_moe", *METHODS)
    """Methods to compare. Each is converted without training, once with its own router and once
    with a ridge-regressed one, and with `router_steps` also trained: `dot_moe` that many steps of
    alignment, the others their router as long on the same batches. Those that prune give a dense
    model, with as many parameters as are active in a conversion where they can choose: 2_4 ones
    cannot. `all`: all of both kinds that fit the model. Default: all that convert."""
    active_params: Share | None = None
    """Share of the dense model's parameters that work on a token, above 0 and at most 1: sets k as
    near to it as whole experts come. Give this, `active` or `active_experts`."""
    mask_steps: Annotated[int, at_least(1)] = 300
    """Steps of `disp_llm`, which is trained, on the batches of an alignment."""
    other_text: tuple[str, ...] = ()
    """Files of another domain to measure every row on as well, as many tokens of them."""
    trained_only: bool = False
    """Leave out what is not trained: every method starts from the ridge-regressed router and takes
    `router_steps`."""
    finetune_steps: Annotated[int, at_least(0)] = 0
    """Steps that every conversion is finetuned, as rows of their own: all weights, the same batches
    for all, from the repaired weights where there are some; 0: not at all."""
    finetune_recipe: Literal["sft", "small"] = "sft"
    """Recipe of `dotmoe finetune` whose other settings these steps have."""
    seeds: tuple[Annotated[int, at_least(0)], ...] = ()
    """Seeds to make every conversion with; the table has their mean, least and greatest. Default:
    `seed` alone."""
    method: Annotated[Literal["dot_moe"], tyro.conf.Suppress] = "dot_moe"


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepConfig(RunConfig):
    """One model, converted once for each value of what is swept: give one of the three `--over`."""

    command: ClassVar[str] = "sweep"

    over_experts: tuple[Annotated[int, at_least(2)], ...] = ()
    """Granularity: numbers of experts a layer (E). The active share stays, so that k grows with
    E."""
    over_active: tuple[Share, ...] = ()
    """Shares of the experts that run, while aligning and in the export. `dotmoe evaluate --curve`
    measures each model at other k."""
    over_start: tuple[Start, ...] = ()
    """Starts of the alignment: what they are worth."""


class Point(NamedTuple):
    """One run of a comparison or of a sweep: its subfolder, and the method or what is swept."""

    name: str
    value: int | float | str
    config: RunConfig


def compare(config: CompareConfig, progress: Progress) -> dict[str, Any]:
    """Make every run that is not finished yet, and write `compare.json`, `.md`, `.html` and `.tex`.

    Where matplotlib is installed, `compare.svg` shows perplexity against active parameters. Raises
    a `UserError`: as `convert`; or no text to measure on, two budgets, one that cannot be met, an
    option that is not built for heads. Runs that were finished before are kept.
    """
    for name in ("active_params", "finetune_steps"):
        if config.experts.targets != "ffn" and (value := getattr(config, name)):
            raise UserError(
                f"{name} is {value:g}, which is for experts of neurons alone, but targets is "
                f"{config.experts.targets}. Leave one of the two out."
            )
    if config.active_params is not None:
        config = _budgeted(config, config.active_params, progress)
    points, budget = points_of(config), budget_of(config, describe_dense(config.model))
    summary = _made(config, points, progress)
    for row in summary["rows"][1:]:
        row["over_budget"] = row["parameters"] / budget - 1
    summary |= {"active_params": config.active_params, "other_text": list(config.other_text)}
    plot = plots.draw_comparison(over_seeds(summary["rows"])) if plots.is_installed() else None
    _write(config, summary, plot)
    return summary


def sweep(config: SweepConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Make every run that is not finished yet, and write `sweep.json`, `.md`, `.html` and `.tex`.

    Returns the contents of `sweep.json`: `axis`, and `rows`, the dense model's first. Raises a
    `UserError`: as `convert`; or, before anything is run, options that do not go together.
    """
    axis, points = swept(config)
    summary = _made(config, points, progress or Progress(quiet=True)) | {"axis": axis}
    _write(config, summary)
    return summary


def _budgeted(config: CompareConfig, share: float, progress: Progress) -> CompareConfig:
    """The same with k for a share of the parameters."""
    for name in ("active", "active_experts"):
        if (value := getattr(config.experts, name)) is not None:
            raise UserError(
                f"active_params is {share:g} and {name} is {value:g}: two budgets. Give one of the "
                "two."
            )
    dense = describe_dense(config.model)
    split = resolve(replace(config.experts, shared=0.0), dense.widths.ffn)
    active = nearest_active_experts(share, dense.config, dense.family, split)
    config = replace(config, experts=replace(config.experts, active_experts=active))
    met = budget_of(config, dense) / num_parameters(dense.model)
    off = _budget({"over_budget": met / share - 1})
    progress.log(
        f"active_params {share:g}: {active} of {split.num_experts} experts make {met:.4f} ({off})"
    )
    return config


def table(summary: dict[str, Any]) -> Table:
    """The rows of a comparison or a sweep, the seeds of a conversion as one."""
    rows, axis = over_seeds(summary["rows"]), summary.get("axis")
    columns: dict[str, Callable[[Row], str | None]] = {
        _SWEPT[axis] if axis else "method": lambda row: (
            percent(row["value"]) if isinstance(row["value"], float) else str(row["value"])
        ),
        "router": lambda row: row.get("router"),
        "trained": lambda row: row.get("trained"),
        "weights": lambda row: row.get("weights"),
        "k of E": lambda row: (
            f"{row['active_experts']} of {row['num_experts']}"
            if axis and "num_experts" in row
            else None
        ),
        "active": _active,
        "perplexity": lambda row: f"{row['perplexity']:.2f}",
        "bits a byte": lambda row: f"{row['bits_per_byte']:.3f}",
        "nats above dense": lambda row: f"{row['loss_above_dense']:.3f}",
        "other text": lambda row: (
            f"{math.exp(row['other_loss']):.2f}" if "other_loss" in row else None
        ),
        "seeds": spread,
        "active parameters": lambda row: millions(row["parameters"]),
        "stored": lambda row: millions(row["stored"]),
        "budget": _budget,
        "shared": lambda row: (
            percent(row["shared_fraction"]) if row.get("shared_fraction") else None
        ),
        "tokens": lambda row: f"{row['text_tokens']:,}" if row.get("text_tokens") else None,
        "seconds": lambda row: f"{row['seconds']:.0f}" if row.get("seconds") else None,
    }
    for name in ("weights", "k of E", "other text", "seeds", "budget", "shared"):
        if not any(map(columns[name], rows)):
            del columns[name]
    other = summary.get("other_text")
    note = f"Other text, perplexity: {', '.join(other)}." if other else ""
    if left_out := summary.get("left_out"):
        note += f" Left out, since their export was not verified: {', '.join(left_out)}."
    return table_of(rows, columns, words=[*columns].index("active"), note=note.strip())


def _active(row: Row) -> str | None:
    """The share of the neurons that run, and its standard deviation over tokens if there is one."""
    share = percent(row["active_fraction"]) if "active_fraction" in row else None
    return f"{share} ± {percent(row['active_std'])}" if "active_std" in row else share


def _budget(row: Row) -> str | None:
    """How far the active parameters are from the budget."""
    over = row.get("over_budget")
    if over is None:
        return None
    return "matched" if abs(over) <= MATCHED else f"{100 * over:+.0f} %"


def over_seeds(rows: Iterable[Row]) -> list[Row]:
    """Rows with the seeds of a run as one: mean loss, perplexity of that, and all `losses`."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        kind = (row["value"], row.get("router"), row.get("trained"), row.get("weights"))
        groups.setdefault(kind, []).append(row)
    made, averaged = [], ("loss", "bits_per_byte", "other_loss", "loss_above_dense")
    for alike in groups.values():
        means = {n: fmean(row[n] for row in alike) for n in averaged if n in alike[0]}
        losses = [row["loss_above_dense"] for row in alike]
        made.append(alike[0] | means | {"perplexity": math.exp(means["loss"]), "losses": losses})
    return made


def spread(row: Row) -> str | None:
    """Least and greatest nats above dense of a row's seeds."""
    losses = row["losses"]
    return f"{min(losses):.3f} to {max(losses):.3f}" if losses[1:] else None


def points_of(config: CompareConfig) -> list[Point]:
    """The runs of a comparison, in the order of its table."""
    plain, methods = _plain(config), config.methods
    if "all" in methods:
        methods = ("dot_moe", *METHODS, *PRUNING)
    made = [
        point
        for method in methods
        for seed in config.seeds or (config.seed,)
        for point in _points_of(method, replace(plain, seed=seed), config)
        if not config.trained_only or _trained(point.config)
    ]
    points = list(dict.fromkeys(made))  # what has no seed comes once
    if not points:
        raise UserError(
            f"trained_only is set, but router_steps is {config.baseline.router_steps} and methods "
            f"are {', '.join(config.methods)}, of which nothing is trained. Set router_steps."
        )
    return points


def swept(config: SweepConfig) -> tuple[str, list[Point]]:
    """What a sweep changes, and its runs."""
    chosen = [axis for axis in _SWEPT if getattr(config, f"over_{axis}")]
    if len(chosen) != 1:
        options = ", ".join(f"--over-{axis}" for axis in _SWEPT)
        raise UserError(
            f"{len(chosen)} things are to be swept, but it must be 1. Give one of {options}."
        )
    if (targets := config.experts.targets) != "ffn":
        raise UserError(f"targets is {targets}, but a sweep is of FFNs. Use dotmoe compare.")
    (axis,), k = chosen, config.experts.active_experts
    if axis in ("experts", "active") and k is not None:
        raise UserError(
            f"active_experts is {k} for all, but k must change with over_{axis}. Give --active, a "
            "share, or leave it out."
        )
    plain, points = _plain(config), list[Point]()
    for value in dict.fromkeys(getattr(config, f"over_{axis}")):
        name = f"{axis}-{value:g}" if isinstance(value, float) else f"{axis}-{value}"
        run = replace(plain, out=str(Path(plain.out) / name))
        if axis == "start":
            run = replace(run, calibrate=replace(run.calibrate, start=value))
        elif axis == "active":
            run = replace(run, experts=replace(run.experts, active=value))
        else:
            run = replace(run, experts=replace(run.experts, experts=value, expert_size=None))
        points.append(Point(name, value, run))
    return axis, points


def _plain(config: RunConfig) -> RunConfig:
    """The config of a conversion that the config of a comparison or of a sweep holds."""
    if not config.eval_text:
        raise UserError(
            "eval_text names no text. Runs are compared on one that none of them is trained on, "
            "the same for all: give --eval-text."
        )
    return RunConfig(**{field.name: getattr(config, field.name) for field in fields(RunConfig)})


def _fitting(
    config: CompareConfig | SweepConfig, points: list[Point], dense: DenseModel, progress: Progress
) -> Iterator[Point]:
    """Runs that fit the model; any other is refused, or dropped where all methods are asked for."""
    for point in points:
        try:
            if isinstance(point.config, PruneRunConfig):
                device = resolved_device(point.config.load.device)
                PRUNING[point.config.method].require(dense, device)
            else:
                split_of(point.config, dense)
        except UserError as error:
            if not (isinstance(config, CompareConfig) and "all" in config.methods):
                raise
            progress.log(f"{point.name} is left out: {error}")
        else:
            yield point


def _made(
    config: CompareConfig | SweepConfig, points: list[Point], progress: Progress
) -> dict[str, Any]:
    """What a comparison and a sweep record, after making every run that is not finished yet.

    Where an export fails its verification, that run is `left_out`, with why, and the others are
    made. Raises a `VerificationError`: all failed.
    """
    described, rows, left_out = describe_dense(config.model), list[Row](), dict[str, str]()
    points = list(_fitting(config, points, described, progress))
    for point in points:
        progress.log(f"{point.name}:")
        try:
            if isinstance(point.config, PruneRunConfig):
                results = prune(point.config, progress)
            else:
                results = convert(point.config, progress).results
            dense = results["dense"]
            if not rows:
                whole = {"active_fraction": 1.0, "shared_fraction": 0.0}
                whole |= dict.fromkeys(("parameters", "stored"), results["parameters"]["dense"])
                rows.append({"run": "dense", "value": "dense", **whole, **_measured(dense, dense)})
            for row in _rows(point, results, described.widths.model):
                rows.append(row)
                if isinstance(config, CompareConfig):
                    rows.extend(_finetuned(config, row, progress))
        except VerificationError as error:
            left_out[point.name] = str(error)
            progress.log(f"{point.name} is left out: {error}")
            if not rows and point is points[-1]:
                raise
    return {
        "origin": "measured",
        "model": config.model,
        "rows": rows,
        "left_out": left_out,
        **{name: dense[name] for name in ("text", "window", "protocol")},
        "provenance": provenance(config.seed),
    }


def _write(config: CompareConfig | SweepConfig, summary: dict[str, Any], plot: Any = None) -> None:
    """Write `NAME.json`, table and protocol as `NAME.md`, `.html` and `.tex`, a plot as `.svg`."""
    name, found = config.command, table(summary)
    path, protocol = (
        Path(config.out) / name,
        f"{', '.join(summary['text'])}: {summary['protocol']}\n",
    )
    write_json(path.with_suffix(".json"), summary)
    write_text(path.with_suffix(".md"), f"{to_markdown(found)}\n\n{protocol}")
    write_text(path.with_suffix(".tex"), to_latex(found))
    shown: list[Any] = [found, protocol]
    if plot is not None:
        caption = "Perplexity against the parameters that work on a token."
        shown = [Block("plot", caption, name), *shown]
        path.with_suffix(".svg").write_bytes(plots.as_svg(plot))
    title, figures = f"{Path(summary['model']).name}: {name}", {} if plot is None else {name: plot}
    page = html_page(title=title, sections={"Results": shown}, figures=figures)
    write_text(path.with_suffix(".html"), page)


def _measured(result: dict[str, Any], dense: dict[str, Any]) -> Row:
    """A perplexity, and how far it is from the dense model's."""
    names = ("perplexity", "loss", "bits_per_byte", "tokens", "window")
    kept = {name: result[name] for name in names}
    if "other" in result:
        kept["other_loss"] = result["other"]["loss"]
    return kept | {"loss_above_dense": result["loss"] - dense["loss"]}


def _points_of(method: str, plain: RunConfig, asked: CompareConfig) -> Iterator[Point]:
    suffix = f"-seed{plain.seed}" * bool(asked.seeds)
    if method in PRUNING:  # what it does not read must not make it another run
        same = ("model", "data", "sample", "load", "eval_text", "other_text", "eval_tokens")
        is_trained, align = PRUNING[method].is_trained, AlignConfig(steps=0)
        if is_trained:
            align = replace(align, steps=asked.mask_steps, batch_size=plain.align.batch_size)
        config = PruneRunConfig(
            **{name: getattr(plain, name) for name in same},
            out=str(Path(plain.out) / (method + suffix * is_trained)),
            method=method,
            experts=ExpertsConfig() if PRUNING[method].is_fixed else plain.experts,
            calibrate=CalibrateConfig(calibration_tokens=plain.calibrate.calibration_tokens),
            align=align,
            seed=plain.seed * is_trained,
        )
        yield Point(Path(config.out).name, method, config)
        return
    steps, options = plain.baseline.router_steps, replace(plain.baseline, router_steps=0)
    if method == "dot_moe":
        changes: dict[str, Any] = {"untrained": {"align": replace(plain.align, steps=0)}}
        for variant, learns in (("router", False), ("trained", True)) if steps else ():
            align = replace(plain.align, steps=steps, learn_assignment=learns)
            changes[variant] = {"align": align}
    else:
        if not METHODS[method].has_shared_expert:
            plain = replace(plain, experts=replace(plain.experts, shared=0.0))
        own, ridge = (replace(options, split_router=router) for router in ("own", "ridge"))
        changes = {"own": {"baseline": own}, "ridge": {"baseline": ridge}}
        if steps:
            changes["trained"] = {"baseline": replace(ridge, router_steps=steps)}
    for variant, change in changes.items():
        name = f"{method}-{variant}{suffix}"
        run = replace(plain, method=method, out=str(Path(plain.out) / name), baseline=options)
        yield Point(name, method, replace(run, **change))


def _trained(config: RunConfig) -> str | None:
    """What a run trains."""
    if isinstance(config, PruneRunConfig):
        return "masks" if config.align.steps else None
    if config.method != "dot_moe":
        return "router" if config.baseline.router_steps else None
    if not config.align.steps:
        return None
    return "router and experts" if config.align.learn_assignment else "router"


def _rows(point: Point, results: dict[str, Any], width: int) -> Iterator[Row]:
    """Rows of a run: what was exported, and what its method's own router would be worth.

    `text_tokens` are those it was given, what a stage reads several times once; `width` is the
    model's.
    """
    config, trained, dense = point.config, _trained(point.config), results["dense"]
    if isinstance(config, PruneRunConfig):
        row = {"run": point.name, "value": point.value, "trained": trained}
        row |= results["pruning"] | _measured(results["pruned"], dense)
        yield row | {"text_tokens": row["calibration_tokens"]}
        return
    exact, split = results.get("moe_own_router"), Granularity.of(results["granularity"])
    router = "ridge" if config.method == "dot_moe" else config.baseline.split_router
    folder, stages = RunFolder(Path(config.out)), ("calibrate", "align", "extract")
    tokens = results["steps"] * config.align.batch_size * config.data.seq_len
    frozen = {
        "run": point.name,
        "value": point.value,
        **asdict(split),
        "active_fraction": split.active_fraction,
        "shared_fraction": split.shared_size / split.units,
        "parameters": results["parameters"]["active"],
        "stored": results["parameters"]["stored"],
        "steps": results["steps"],
        "seed": config.seed,
        "router": router if exact is None else "own, linear",
        "trained": trained or "nothing",
        "weights": "frozen",
        "seconds": folder.seconds(*stages),
        "text_tokens": config.calibrate.tokens(width) + tokens,
        **_measured(results["frozen" if config.repair else "moe"], dense),
    }
    yield frozen
    if config.repair:
        repaired = {"weights": "repaired", "seconds": folder.seconds(*stages, "repair")}
        repaired["text_tokens"] = frozen["text_tokens"] + results["repair"]["tokens"]
        yield frozen | repaired | _measured(results["moe"], dense)
    if exact is not None:
        own = frozen | _measured(exact, dense) | {"router": _OWN}
        yield own | _as_active(exact["active"], frozen, results["parameters"]["dense"])


def _finetuned(config: CompareConfig, row: Row, progress: Progress) -> Iterator[Row]:
    """The row of an export after its finetuning, if there is one, made where it is not finished."""
    exported = "repaired" if config.repair else "frozen"
    is_exported = row.get("weights") == exported and row["router"] != _OWN
    if not (is_exported and config.finetune_steps):
        return
    settings, out = finetune_recipe(config.finetune_recipe), Path(config.out)
    name = f"{row['run']}-finetuned"
    progress.log(f"{name}:")
    run = replace(
        settings,
        run=str(out / row["run"]),
        out=str(out / name),
        data=replace(settings.data, seq_len=config.data.seq_len),
        finetune=replace(settings.finetune, steps=config.finetune_steps),
        export=config.export,
        training=config.training,
        load=config.load,
        seed=row["seed"],
    )
    results = finetune(run, progress).results
    tuned: Row = {"run": name, "weights": "finetuned", "finetune_tokens": results["tokens"]}
    tuned["text_tokens"] = row["text_tokens"] + results["tokens"]
    tuned["seconds"] = row["seconds"] + (RunFolder(out / name).seconds("finetune") or 0.0)
    yield row | tuned | _measured(results["moe"], results["dense"])


def _as_active(active: dict[str, Any], row: Row, dense: int) -> Row:
    """Share and parameters of a router that runs another number of experts for each token."""
    share, rest = active["mean"], 1 - row["active_fraction"]
    if active["std"] == 0 or rest == 0:
        return {}
    ffns = (dense - row["parameters"]) / rest
    parameters = round(dense - (1 - share) * ffns)
    return {"active_fraction": share, "active_std": active["std"], "parameters": parameters}
