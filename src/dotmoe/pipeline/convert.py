"""`convert`: a dense model becomes a MoE checkpoint, stage by stage.

answers -> tokenise (-> share) (-> dense layers) -> calibrate -> align -> extract (-> repair)
-> export -> evaluate -> report
"""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from dotmoe.common.device import resolved_device
from dotmoe.common.distributed import (
    broadcast_from_rank_zero,
    process_group,
    raise_on_all_ranks,
    require_one_process,
)
from dotmoe.common.options import changed, checked
from dotmoe.common.progress import Progress
from dotmoe.export.write import export_dtype, require_exportable
from dotmoe.measure.inspection import chosen_in_time
from dotmoe.method.align import Alignment, align
from dotmoe.method.calibrate import calibrate
from dotmoe.method.config import RepairConfig
from dotmoe.method.dense_layers import leading_outliers
from dotmoe.method.extract import Extracted, extract, load_extracted, save_extracted
from dotmoe.method.granularity import Splits
from dotmoe.method.masked import masked_by
from dotmoe.method.repair import repair_tokens
from dotmoe.method.state import States, load_states, save_states
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.load import describe_dense, load_dense
from dotmoe.models.on_disk import on_disk
from dotmoe.pipeline import keep
from dotmoe.pipeline.conversion import Conversion
from dotmoe.pipeline.device import fitting_the_device
from dotmoe.pipeline.stages import Run
from dotmoe.rivals import baselines
from dotmoe.run.config import RunConfig
from dotmoe.run.defaults import splits_for, with_defaults
from dotmoe.run.folder import RunFolder

_DENSE_LAYERS = "dense_layers.json"


def convert(config: RunConfig, progress: Progress | None = None) -> Conversion:
    """Convert a dense model; stages that are finished in the run folder are not run again.

    Under torchrun every rank calls it, and all must see the same run folder. Only rank zero writes
    and prints. After the repair the other ranks return, and rank zero continues alone.

    Raises:
        UserError: The input is bad, or another process uses the run folder. After any exception a
            new run folder is removed, unless there is a finished stage or progress to resume.
    """
    with ExitStack() as work:
        with process_group(resolved_device(config.load.device)):
            given = raise_on_all_ranks(lambda: checked(config))
            config = raise_on_all_ranks(lambda: config_with_defaults(given))
            # What nobody gave follows anew, if the config is repeated with other options.
            followed = {*given.followed, *changed(config, given)}
            config = replace(config, followed=tuple(sorted(followed)))
            if config.time:
                config = broadcast_from_rank_zero(lambda: _in_time(config, progress))
            run = Run(config, progress)
            if run.start(work):
                return run.conversion()
            fitted = _fitted(run)
        if run.is_rank_zero:
            while not _exports_enough(run, *fitted):  # with --keep, a larger share is next
                fitted = _fitted(run)
        return run.conversion()


def _fitted(run: Run) -> tuple[DenseModel, tuple[Extracted, ...], dict[str, Any]]:
    """Run the stages up to the repair: the dense model, the layouts, and metrics."""
    config = run.config
    dense = load_dense(run.folder.model, config.load)
    splits = raise_on_all_ranks(lambda: exportable_splits(config, dense))
    wanted = config.calibration_tokens(dense.widths.model)
    if config.repair:
        wanted = max(wanted, repair_tokens(config.repairing, splits, dense.config))
    aligned = config.align.steps * config.align.batch_size * config.data.seq_len
    run.answer(dense, max(wanted, aligned))
    run.tokenise(dense, wanted)
    at_share = keep.at_chosen_share(run, dense)
    splits = exportable_splits(at_share, dense)
    if at_share.experts.first_dense_layers is None:
        splits = _with_dense_layers(run, dense, splits)
    states = None
    if config.method == "dot_moe" or config.align.steps:
        states = _align(run, dense, splits, _calibrate(run, dense, splits))
    extracted = _extract(run, dense, splits, states)
    steps = config.align.schedule(run.text.training.num_blocks).steps
    metrics: dict[str, Any] = {"steps": steps}
    if dense.weights == "shards":
        dense = on_disk(dense, dense.device, next(dense.model.parameters()).dtype)
    if config.repair:
        metrics["repair"] = run.repair(dense, tuple(each.layout for each in extracted))
    return dense, extracted, metrics


def _exports_enough(
    run: Run, dense: DenseModel, extracted: tuple[Extracted, ...], metrics: dict[str, Any]
) -> bool:
    """Export and measure; whether the export keeps as much as the run is asked to keep."""
    layouts = tuple(each.layout for each in extracted)
    weights = run.trained("repair", dense) if run.config.repair else dense
    run.export(dense, weights, layouts)
    try:
        run.evaluate(
            dense,
            layouts,
            lambda: metrics | _measure_unexported(run, dense, extracted),
            judge=keep.judge_of(run, dense),
        )
    except keep.MissedError as missed:
        keep.take_next(run, missed)
        return False
    return True


def config_with_defaults(config: RunConfig) -> RunConfig:
    """The config as it is meant for its model; methods other than DOT-MoE run on one rank."""
    if config.method != "dot_moe":
        require_one_process(f"method {config.method}")
    dense = describe_dense(config.model)
    keep.require_answers(config, dense)
    return with_defaults(config, dense, export_dtype(dense, config.export))


def exportable_splits(config: RunConfig, dense: DenseModel) -> Splits:
    """The splits of a conversion; refused if they do not suit the model or export.

    A run that is asked to keep an amount is checked with the default share.
    """
    config = replace(config, experts=replace(config.experts, keep=None))
    splits = splits_for(config.method, config, dense, export_dtype(dense, config.export))
    require_exportable(dense, splits, config.export)
    return splits


def _in_time(config: RunConfig, progress: Progress | None) -> RunConfig:
    """The config with the repair that `time` allows: the one that the run began with, if it has.

    Raises a `UserError` as `chosen_in_time` does, such as for another repair that is given as well.
    """
    folder = RunFolder(Path(config.out))
    if folder.exists:
        begun = folder.config(RunConfig)
        is_repair_open = config.repairing in (RepairConfig(), begun.repairing)
        if begun.time == config.time and is_repair_open:
            return replace(config, repairing=begun.repairing)
    config, why = chosen_in_time(config)
    (progress or Progress(quiet=True)).log(why)
    return config


def _with_dense_layers(run: Run, dense: DenseModel, splits: Splits) -> Splits:
    """The splits with the number of leading dense layers, measured on the text."""

    def make(folder: Path) -> dict[str, Any]:
        leading, errors_L = leading_outliers(dense, run.text.training, splits[0].active_fraction)
        median = float(errors_L.median())
        times = ", ".join(f"{error / median:.1f}" for error in errors_L[: leading + 1].tolist())
        run.progress.log(
            f"first_dense_layers {leading}: pruned to the active share, the first layers lose "
            f"{times} times as much as the median layer"
        )
        return {"first_dense_layers": leading, "errors": errors_L.tolist()}

    record = run.json_stage("dense_layers", _DENSE_LAYERS, make)
    leading = record["first_dense_layers"]
    return tuple(replace(split, first_dense_layers=leading) for split in splits)


def _calibrate(run: Run, dense: DenseModel, splits: Splits) -> States:
    """Initial affinities and routers; for a method other than DOT-MoE from its own split."""
    config = run.config

    def make(folder: Path) -> States:
        if config.method != "dot_moe":
            made = _split_by_baseline(run, dense, splits)
            return tuple(baselines.state_of(each.layout, dense.device) for each in made)
        with run.progress.bar(f"calibrate ({config.calibrate.start})") as update:
            start = partial(
                calibrate,
                config=config.calibrate,
                assignment=config.assignment,
                seed=config.seed,
                on_progress=update,
            )
            return tuple(start(dense, run.text.training, split) for split in splits)

    load = partial(load_states, device=dense.device)
    return run.run_stage("calibrate", load, make, save=save_states)


def _align(run: Run, dense: DenseModel, splits: Splits, start: States) -> States:
    """Learned affinities and routers; those of the start if there are no steps."""
    config = run.config

    def make(folder: Path) -> States:
        if not config.align.steps:
            return start
        how = fitting_the_device(
            run,
            dense,
            splits,
            config.align,
            dtype=next(dense.model.parameters()).dtype,
            sharded=dense.weights == "shards",
        )
        blocks = run.text.training
        task = Alignment(dense, blocks, start, splits, how, config.assignment, seed=config.seed)
        with run.training_bar("align") as on_step:
            return align(task, folder, config.training, on_step)

    load = partial(load_states, device=dense.device)
    return run.run_stage("align", load, make, save=save_states)


def _extract(
    run: Run, dense: DenseModel, splits: Splits, states: States | None
) -> tuple[Extracted, ...]:
    """The layouts: rounded from aligned states, or made directly by a method without training."""

    def make(folder: Path) -> tuple[Extracted, ...]:
        if states is None:
            return _split_by_baseline(run, dense, splits)
        pairs = zip(states, splits, strict=True)
        layouts = (extract(state, split, run.config.assignment) for state, split in pairs)
        return broadcast_from_rank_zero(lambda: tuple(Extracted(layout=each) for each in layouts))

    return run.run_stage("extract", load_extracted, make, save=save_extracted)


def _split_by_baseline(run: Run, dense: DenseModel, splits: Splits) -> tuple[Extracted, ...]:
    """Experts and routers of a method other than DOT-MoE."""
    config = run.config
    inputs = partial(
        baselines.SplitInputs,
        dense=dense,
        tokens_BT=run.text.training.drawn(config.calibrate.tokens(dense.widths.model)),
        config=config.baseline,
        calibrate=config.calibrate,
        seed=config.seed,
    )
    with run.progress.bar(config.method) as update:
        split_by = partial(baselines.baseline, config.method, on_progress=update)
        return tuple(split_by(inputs(granularity=split)) for split in splits)


def _measure_unexported(
    run: Run, dense: DenseModel, extracted: tuple[Extracted, ...]
) -> dict[str, Any]:
    """Perplexity before the repair, and with the method's own router if no export can hold it."""
    results, first = {}, extracted[0]
    if run.config.repair:
        frozen = masked_by(dense, *(each.layout for each in extracted))
        results["frozen"] = run.perplexity_within(frozen, "before repair", dense)
    if first.own_router and run.config.baseline.split_router == "own":
        shares = list[Tensor]()
        routed = baselines.routed_by_own(run.config.method, dense, first, shares)
        own = run.perplexity_within(routed, "its own router", dense)
        active = baselines.active_share(shares, len(first.layout.moe_layers))
        results["moe_own_router"] = own | {"active": active}
    return results
