"""`convert`, `finetune` and `prune`: their stages in order, each recorded in the run folder.

convert:   tokenise -> calibrate -> align -> extract (-> repair) -> export -> evaluate -> report
finetune:  tokenise -> finetune -> export -> evaluate -> report
prune:     tokenise -> prune -> evaluate
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from dotmoe.common.distributed import (
    broadcast_from_rank_zero,
    is_rank_zero,
    memory_of,
    num_ranks,
    process_group,
    raise_on_all_ranks,
    require_equal_shares,
    require_one_process,
    resolved_device,
)
from dotmoe.common.errors import UserError, require_package
from dotmoe.common.files import read_json, write_json
from dotmoe.common.options import checked, values_of
from dotmoe.common.progress import Progress
from dotmoe.common.tables import in_bytes
from dotmoe.export.parameters import count_parameters
from dotmoe.export.record import ExportRecord, require_checksums, write_model_card
from dotmoe.export.write import export, export_dtype, require_exportable
from dotmoe.measure.evaluate import perplexity
from dotmoe.measure.inspection import chosen_in_time
from dotmoe.measure.inspection.planner import fitting
from dotmoe.measure.inspection.sizes import Sizes, Step
from dotmoe.measure.report.page import html_report
from dotmoe.method.align import Alignment, align
from dotmoe.method.calibrate import OUTLIER_TOKENS, calibrate, leading_outliers, pruning_errors
from dotmoe.method.config import AlignConfig, FinetuneConfig, ObjectiveConfig
from dotmoe.method.finetuning import computed_in
from dotmoe.method.finetuning import finetune as train
from dotmoe.method.granularity import Splits, targets_of, to_record
from dotmoe.method.layout import (
    Layouts,
    States,
    extract,
    load_layouts,
    load_states,
    save_states,
    splits_in,
)
from dotmoe.method.masked import masked_by
from dotmoe.method.repair import METRICS, repair, repair_tokens
from dotmoe.models.checkpoint import fingerprint
from dotmoe.models.family import DenseModel, num_parameters
from dotmoe.models.load import describe_dense, left_on_disk, load_dense, trained_model
from dotmoe.models.on_disk import on_disk
from dotmoe.rivals import baselines, pruning
from dotmoe.rivals.baselines import Baseline, Baselines
from dotmoe.run.config import FinetuneRunConfig, PruneRunConfig, RunConfig
from dotmoe.run.finished import FinishedRun
from dotmoe.run.folder import RESULTS, RunFolder, provenance
from dotmoe.run.settled import settled, splits_for
from dotmoe.text.blocks import TokenBlocks
from dotmoe.text.tokenise import OTHER, Text, require_sources, tokenise, write_windows
from dotmoe.training.folder import OnStep

Training = TypeVar("Training", AlignConfig, FinetuneConfig)

_DENSE_LAYERS = "dense_layers.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """Result of `convert` or `finetune`: where the files are, and what was measured."""

    folder: Path
    """The run folder."""
    export: Path
    """The checkpoint, loadable by stock Transformers."""
    report: Path
    """HTML page on what the conversion lost and gained; `report.md` is the same without plot."""
    results: dict[str, Any]
    """Contents of `6_evaluate/results.json`; empty on ranks other than rank zero."""


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
            config = raise_on_all_ranks(lambda: settled_config(checked(config)))
            if config.time:
                config = broadcast_from_rank_zero(lambda: _in_time(config, progress))
            run = _Run(config, progress)
            if run.start(work):
                return run.conversion()
            dense = load_dense(run.folder.model, config.load)
            splits = raise_on_all_ranks(lambda: exportable_splits(config, dense))
            to_repair = config.repair * repair_tokens(config.repairing, splits, dense.config)
            run.tokenise(dense, max(config.calibration_tokens(dense.widths.model), to_repair))
            splits = _with_dense_layers(run, dense, splits)
            states = None
            if config.method == "dot_moe" or config.align.steps:
                states = _align(run, dense, splits, _calibrate(run, dense, splits))
            extracted = _extract(run, dense, splits, states)
            layouts = tuple(each.layout for each in extracted)
            steps = config.align.schedule(run.text.training.num_blocks).steps
            metrics: dict[str, Any] = {"steps": steps}
            if dense.weights == "shards":
                dense = on_disk(dense, dense.device, next(dense.model.parameters()).dtype)
            if config.repair:
                metrics["repair"] = run.repair(dense, layouts)
        if not run.is_rank_zero:
            return run.conversion()
        weights = run.trained("repair", dense) if config.repair else dense
        run.export(dense, weights, layouts)
        run.evaluate(dense, layouts, lambda: metrics | _measure_unexported(run, dense, extracted))
        return run.conversion()


def settled_config(config: RunConfig) -> RunConfig:
    """The config as it is meant for its model; methods other than DOT-MoE run on one rank."""
    if config.method != "dot_moe":
        require_one_process(f"method {config.method}")
    dense = describe_dense(config.model)
    return settled(config, dense, export_dtype(dense, config.export))


def finetune(config: FinetuneRunConfig, progress: Progress | None = None) -> Conversion:
    """Train the model of a finished run, then export and measure the result.

    Everything else is as for `convert`; rank zero continues alone after the training.

    Raises:
        UserError: As for `convert`; or RUN is not finished, or is itself the result of `finetune`.
    """
    with ExitStack() as work:
        with process_group(resolved_device(config.load.device)):
            given = raise_on_all_ranks(lambda: checked(config))
            config = _for_each_rank(given)
            source, converted = raise_on_all_ranks(lambda: _source(config))
            run = _Run(config, progress, converted)
            if config != given:
                how, ranks = config.finetune, num_ranks()
                run.progress.log(f"batch_size {ranks} and {how.steps} steps, one row for each rank")
            if run.start(work, source):
                return run.conversion()
            dense = raise_on_all_ranks(source.origin)
            splits = splits_in(source.layouts)
            raise_on_all_ranks(lambda: require_exportable(dense, splits, config.export))
            run.tokenise(dense, 0, beside=source.text)
            layouts, blocks = _train(run, dense, source), run.text.training
            steps = config.finetune.schedule(blocks.num_blocks).steps
            tokens = steps * config.finetune.batch_size * blocks.seq_len
            metrics = {"steps": steps, "tokens": tokens}
        if not run.is_rank_zero:
            return run.conversion()
        if source.has_own_weights and not config.eval_text and source.folder.has("evaluate"):
            measured = read_json(source.folder.verified("evaluate") / RESULTS)
            metrics["frozen"] = measured["frozen"]  # on the same text, before the repair
        before = "repaired" if source.has_own_weights else "converted"
        earlier = {before: source.folder.stage("export")} if source.folder.has("export") else {}
        dense = left_on_disk(dense, config.load)
        run.export(dense, run.trained("finetune", dense), layouts)
        run.evaluate(dense, layouts, lambda: metrics, earlier)
        return run.conversion()


def prune(config: PruneRunConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Prune a dense model by a published method, write it as a checkpoint, and measure it.

    Returns:
        Contents of `6_evaluate/results.json`: perplexity of the `dense` and the `pruned` model,
        `parameters` of the dense one, and `pruning`, which `dotmoe.rivals.pruning.prune` describes.

    Raises:
        UserError: As for `convert`; or the method does not fit the model.
    """
    config = checked(config)
    run = _Run(config, progress)
    with ExitStack() as work:
        if not run.start(work):
            dense = describe_dense(run.folder.model)
            run.tokenise(dense, config.calibrate.tokens(dense.widths.model))
            metrics = _prune(run, dense)
            run.write_results(lambda: _measure_pruned(run, dense, metrics))
        return run.results()


class _Run:
    """A run in progress, with the stages that several commands share."""

    text: Text
    """Training and held-out text, set by `tokenise`."""
    texts: dict[tuple[str, ...], TokenBlocks]
    """Texts to measure perplexity on, by name: the held-out text, and `other_text` if given."""

    def __init__(
        self, config: Any, progress: Progress | None, converted: RunConfig | None = None
    ) -> None:
        self.config = config
        self.converted: RunConfig = converted or config
        """Config of the conversion, which names the text sources."""
        self.training: ObjectiveConfig = config.finetune if converted else config.align
        self.is_rank_zero = is_rank_zero()
        self.progress = progress if progress and self.is_rank_zero else Progress(quiet=True)
        self.folder = RunFolder(Path(config.out), self.progress.log)
        self.stage = self.folder.run_stage

    def start(self, work: ExitStack, source: FinishedRun | None = None) -> bool:
        """Lock the run folder while `work` is open; returns whether the run is already finished.

        `source` is the run to finetune, None if the run begins with a dense model.
        """
        config, folder = self.config, self.folder
        last = "prune" if isinstance(config, PruneRunConfig) else "export"

        def start() -> bool:
            work.enter_context(folder.at_work(config))
            is_done = folder.has(last, "evaluate")
            if not is_done and not folder.has("data"):
                texts = (*config.eval_text, *self.converted.other_text)
                require_sources(self.converted.data, texts)
            if source:
                begun, inputs = source.folder.manifest, source.fingerprints
                model, revision = begun["model"], begun.get("revision")
            else:
                dense = describe_dense(folder.model if folder.exists else config.model)
                model, revision = config.model, dense.revision
                inputs = {"model": fingerprint(dense.folder)}
            if is_done:
                folder.require_inputs(inputs)
            else:
                folder.begin(config, model, revision, inputs)
            return is_done

        if self.training.steps:
            raise_on_all_ranks(lambda: require_equal_shares(self.training.batch_size))
        return broadcast_from_rank_zero(start)

    def tokenise(self, dense: DenseModel, min_tokens: int, beside: Text | None = None) -> None:
        """Run the tokenise stage; rank zero alone writes the training and the held-out text."""
        config, data = self.config, self.converted.data

        def write(folder: Path) -> None:
            if other := self.converted.other_text:
                path, tokens = folder / OTHER, config.eval_tokens
                write_windows(other, data, dense, path, tokens, self.progress)
            tokenise(
                data,
                dense,
                folder,
                blocks=max(1, self.training.steps * self.training.batch_size),
                min_tokens=min_tokens,
                eval_text=config.eval_text,
                eval_tokens=config.eval_tokens,
                progress=self.progress,
                beside=beside,
            )

        def make(folder: Path) -> Text:
            broadcast_from_rank_zero(lambda: write(folder))
            return raise_on_all_ranks(lambda: Text.load(folder))

        self.text = text = self.stage("data", Text.load, make)
        self.texts = {text.heldout_name: text.heldout}
        if other := self.converted.other_text:
            self.texts[other] = TokenBlocks.load(self.folder.stage("data") / OTHER)

    @contextmanager
    def training_bar(self, title: str) -> Iterator[OnStep]:
        """Within this context, a bar shows training steps, tokens per second and active losses."""
        losses = [name for name in ("kl", "ce") if getattr(self.training, f"{name}_weight")]
        blocks = self.text.training
        steps = self.training.schedule(blocks.num_blocks).steps
        with self.progress.bar(title, self.training.batch_size * blocks.seq_len) as update:
            yield lambda step, metrics: update(
                step, steps, " ".join(f"{name} {metrics[name]:.3f}" for name in losses)
            )

    def repair(self, dense: DenseModel, layouts: Layouts) -> dict[str, Any]:
        """Run the stage that repairs the dense weights under the layouts' masks; its metrics."""

        def make(folder: Path) -> dict[str, Any]:
            blocks, how = self.text.training, self.config.repairing
            with self.progress.bar("repair") as update:
                return repair(dense, layouts, blocks, how, folder=folder, on_progress=update)

        return self.stage("repair", lambda folder: read_json(folder / METRICS), make)

    def trained(self, stage: str, dense: DenseModel) -> DenseModel:
        """The dense model with the weights that a stage wrote, left on disk."""
        return left_on_disk(trained_model(dense, self.folder.stage(stage)), self.config.load)

    def export(self, dense: DenseModel, weights: DenseModel, layouts: Layouts) -> None:
        """Write and verify the export of `weights`: `dense`, or its repaired or finetuned form."""

        def make(folder: Path) -> None:
            tokens_BT, how = self.text.heldout.tokens_BT, self.config.export
            with self.progress.bar("export") as update:
                export(weights, layouts, folder, how, tokens_BT, origin=dense, on_progress=update)

        self.stage("export", require_checksums, make)

    def evaluate(
        self,
        dense: DenseModel,
        layouts: Layouts,
        measure: Callable[[], dict[str, Any]],
        earlier: dict[str, Path] | None = None,
    ) -> None:
        """Measure perplexity of the dense model, the export, and `earlier` exports by name.

        The results also have what `measure` returns and what the export's record contains.
        """
        exported = self.folder.stage("export")

        def measured() -> dict[str, Any]:
            record = ExportRecord.load(exported)
            results = self.perplexities(dense, {**(earlier or {}), "moe": exported})
            note = f"Text: {perplexity.text_names(results['dense'])}."
            table = replace(perplexity.perplexity_table(results), note=note)
            write_model_card(exported, record, table)
            return {
                **results,
                **measure(),
                "granularity": to_record(splits_in(layouts)),
                "parameters": record.parameters,
                "verification": record.verification_in_short(),
            }

        self.write_results(measured)

    def write_results(self, measure: Callable[[], dict[str, Any]]) -> None:
        """Run the evaluate stage: write what `measure` returns, with config and provenance."""

        def make(folder: Path) -> None:
            origin = {"origin": "measured", "config": values_of(self.config)}
            origin["provenance"] = provenance(self.config.seed)
            write_json(folder / RESULTS, measure() | origin)

        self.stage("evaluate", lambda folder: None, make)

    def results(self) -> dict[str, Any]:
        """The results that the evaluate stage wrote."""
        return read_json(self.folder.verified("evaluate") / RESULTS)

    def perplexities(self, dense: DenseModel, exports: dict[str, Path]) -> dict[str, Any]:
        """Perplexity of the dense model and of exports, by name."""
        with self.progress.bar("evaluate", tokens=1) as update:
            return perplexity.perplexities(dense, exports, self.texts, update)

    def perplexity_within(
        self, change: AbstractContextManager[None], name: str, dense: DenseModel
    ) -> dict[str, Any]:
        """Perplexity of a dense model in memory while the context `change` alters it."""
        with self.progress.bar(f"evaluate {name}", tokens=1) as update, change:
            return perplexity.heldout_perplexity(dense.model, dense.tokenizer, self.texts, update)

    def conversion(self) -> Conversion:
        """The result of the run; the report is made anew each time, from result files alone."""
        path, exported = self.folder.path, self.folder.stage("export")
        page, results = self.folder.stage("report") / "report.html", {}
        if self.is_rank_zero:
            results = self.results()
            require_checksums(exported, read_weights=False)
            page = html_report(path)
        return Conversion(folder=path, export=exported, report=page, results=results)


# --- checks and numbers that are needed before any stage ---------------------------------------


def _in_time(config: RunConfig, progress: Progress | None) -> RunConfig:
    """The config with the repair that `time` allows: the one that the run began with, if it has."""
    folder = RunFolder(Path(config.out))
    if folder.exists and (begun := folder.config(RunConfig)).time == config.time:
        return replace(config, repairing=begun.repairing)
    config, why = chosen_in_time(config)
    (progress or Progress(quiet=True)).log(why)
    return config


def exportable_splits(config: RunConfig, dense: DenseModel) -> Splits:
    """The splits of a conversion; refused if they do not suit the model or export."""
    splits = splits_for(config.method, config, dense, export_dtype(dense, config.export))
    require_exportable(dense, splits, config.export)
    return splits


def budget_of(config: RunConfig, dense: DenseModel) -> int:
    """Active parameters per token of a conversion with these experts, without routers."""
    requested = splits_for("dot_moe", config, dense, export_dtype(dense, config.export))
    return count_parameters(dense.model, dense.family, requested).active


def _source(config: FinetuneRunConfig) -> tuple[FinishedRun, RunConfig]:
    """The run to finetune, and its config with the text sources of the finetuning."""
    if config.finetune.train == "lora":
        require_package("peft", "lora", "train lora")
    source = FinishedRun(Path(config.run))
    if not isinstance(source.config, RunConfig):
        raise UserError(
            f"{config.run} is finetuned already. Name the dotmoe convert run it was made from."
        )
    if targets_of(splits_in(source.layouts)) != "ffn":
        raise UserError(
            f"{config.run} has experts made of heads, which cannot be trained further yet. Convert "
            "with --repair, or with --targets ffn."
        )
    data = replace(source.config.data, seq_len=config.data.seq_len)
    return source, replace(source.config, data=config.data if config.data.data else data)


def _for_each_rank(config: FinetuneRunConfig) -> FinetuneRunConfig:
    """The config, with batches of a row for each rank and as many rows in all if it has smaller."""
    how, ranks = config.finetune, num_ranks()
    if how.batch_size >= ranks:
        return config
    steps = -(-how.steps * how.batch_size // ranks)
    return replace(config, finetune=replace(how, batch_size=ranks, steps=steps))


# --- stages of one command ---------------------------------------------------------------------


def _with_dense_layers(run: _Run, dense: DenseModel, splits: Splits) -> Splits:
    """The splits with the number of leading dense layers, measured if the config leaves it open."""
    if run.config.experts.first_dense_layers is not None:
        return splits

    def make(folder: Path) -> dict[str, Any]:
        tokens_BT = run.text.training.drawn(OUTLIER_TOKENS)
        errors_L = pruning_errors(dense, tokens_BT, splits[0].active_fraction)
        median, leading = float(errors_L.median()), leading_outliers(errors_L)
        times = ", ".join(f"{error / median:.1f}" for error in errors_L[: leading + 1].tolist())
        run.progress.log(
            f"first_dense_layers {leading}: pruned to the active share, the first layers lose "
            f"{times} times as much as the median layer"
        )
        return {"first_dense_layers": leading, "errors": errors_L.tolist()}

    record = run.stage(
        "dense_layers",
        lambda folder: read_json(folder / _DENSE_LAYERS),
        make,
        save=lambda record, folder: write_json(folder / _DENSE_LAYERS, record),
    )
    leading = record["first_dense_layers"]
    return tuple(replace(split, first_dense_layers=leading) for split in splits)


def _calibrate(run: _Run, dense: DenseModel, splits: Splits) -> States:
    """Initial affinities and routers; for a method other than DOT-MoE from its own split."""
    config = run.config

    def make(folder: Path) -> States:
        if config.method != "dot_moe":
            made = _split_by_baseline(run, dense, splits)
            return tuple(baselines.state_of(each.layout, dense.device) for each in made)
        how, seed = config.calibrate, config.seed
        with run.progress.bar(f"calibrate ({how.start})") as update:
            start = partial(calibrate, config=how, seed=seed, on_progress=update)
            return tuple(start(dense, run.text.training, split) for split in splits)

    load = partial(load_states, device=dense.device)
    return run.stage("calibrate", load, make, save=save_states)


def _align(run: _Run, dense: DenseModel, splits: Splits, start: States) -> States:
    """Learned affinities and routers; those of the start if there are no steps."""
    config = run.config

    def make(folder: Path) -> States:
        if not config.align.steps:
            return start
        dtype, blocks = next(dense.model.parameters()).dtype, run.text.training
        align_how = _fitting(run, dense, splits, config.align, (dtype, dense.weights == "shards"))
        how = align_how, config.assignment
        task = Alignment(dense, blocks, start, splits, *how, seed=config.seed)
        with run.training_bar("align") as on_step:
            return align(task, folder, config.training, on_step)

    load = partial(load_states, device=dense.device)
    return run.stage("align", load, make, save=save_states)


def _fitting(
    run: _Run, dense: DenseModel, splits: Splits, how: Training, placed: tuple[torch.dtype, bool]
) -> Training:
    """The options of a training, the same on all ranks, with what makes its step fit the device.

    `placed` is the dtype that it computes in, and whether ranks shard the weights.
    """
    device, (dtype, sharded) = resolved_device(run.config.load.device), placed
    train, offload = getattr(how, "train", "assignment"), getattr(how, "offload", False)

    def fitted() -> dict[str, Any]:
        sizes = Sizes(dense.model, splits, stored=dtype, written=dtype)
        step = Step(
            sizes=sizes,
            batch_size=how.batch_size,
            seq_len=run.text.training.seq_len,
            micro_batch_size=min(how.micro_batch_size, how.batch_size // num_ranks()),
            held=4 if dtype.itemsize == 4 else 2,
            train=train,  # type: ignore[arg-type]
            distils=how.kl_weight > 0,  # as an alignment always does
            on_cpu=device.type == "cpu",
            checkpointing=how.activation_checkpointing,
            ranks=num_ranks(),
            sharded=sharded or offload,
            offload=offload,
        )
        chosen = fitting(step, memory_of(device))
        size = chosen.micro_batch_size
        if chosen != step:
            host = f", offload to {in_bytes(chosen.on_host)} of the host's memory for each rank"
            run.progress.log(
                "a step would not fit into memory, by estimate: activation_checkpointing is on, "
                f"micro_batch_size {size}" + host * chosen.offload
            )
        changes = {"micro_batch_size": min(how.micro_batch_size, size)}
        changes |= {"activation_checkpointing": chosen.checkpointing}
        return changes | ({"offload": True} if chosen.offload else {})

    return replace(how, **broadcast_from_rank_zero(fitted))


def _extract(run: _Run, dense: DenseModel, splits: Splits, states: States | None) -> Baselines:
    """The layouts: rounded from aligned states, or made directly by a method without training."""

    def make(folder: Path) -> Baselines:
        if states is None:
            return _split_by_baseline(run, dense, splits)
        pairs, how = zip(states, splits, strict=True), run.config.assignment
        extracted = (Baseline(layout=extract(state, split, how)) for state, split in pairs)
        return broadcast_from_rank_zero(lambda: tuple(extracted))

    load, save = baselines.load_baselines, baselines.save_baselines
    return run.stage("extract", load, make, save=save)


def _split_by_baseline(run: _Run, dense: DenseModel, splits: Splits) -> Baselines:
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


def _measure_unexported(run: _Run, dense: DenseModel, extracted: Baselines) -> dict[str, Any]:
    """Perplexity before the repair, and with the method's own router if no export can hold it."""
    results, first = {}, extracted[0]
    if run.config.repair:
        frozen = masked_by(dense, *(each.layout for each in extracted))
        results["frozen"] = run.perplexity_within(frozen, "before repair", dense)
    if first.own and run.config.baseline.split_router == "own":
        shares = list[Tensor]()
        routed = baselines.routed_by_own(run.config.method, dense, first, shares)
        own = run.perplexity_within(routed, "its own router", dense)
        active = baselines.active_share(shares, len(first.layout.moe_layers))
        results["moe_own_router"] = own | {"active": active}
    return results


def _train(run: _Run, dense: DenseModel, source: FinishedRun) -> Layouts:
    """Run the finetune stage on a finished run; returns its layout with the trained routers."""
    config, start, origin = run.config, dense, None
    (layout,) = source.layouts  # of FFNs: experts made of heads are refused
    if source.has_own_weights:
        start, origin = raise_on_all_ranks(source.described), dense

    def make(folder: Path) -> Layouts:
        placed = computed_in(start, config.finetune, config.load)
        how = _fitting(run, start, (layout.granularity,), config.finetune, placed)
        with run.training_bar(f"finetune ({config.finetune.train})") as on_step:
            trained = train(
                start,
                layout,
                run.text.training,
                how,
                folder=folder,
                seed=config.seed,
                load=config.load,
                origin=origin,
                training=config.training,
                on_step=on_step,
            )
        return (trained,)

    return run.stage("finetune", load_layouts, make)


def _prune(run: _Run, dense: DenseModel) -> dict[str, Any]:
    """Run the prune stage, which writes a checkpoint; returns the record of what was removed."""
    config = run.config

    def make(folder: Path) -> dict[str, Any]:
        blocks, size, seed = run.text.training, config.align.batch_size, config.seed
        with run.progress.bar(config.method) as update:
            inputs = pruning.PruneInputs(
                dense=load_dense(dense.source, config.load),
                tokens_BT=blocks.drawn(config.calibrate.tokens(dense.widths.model)),
                wanted=budget_of(config, dense),
                batch=lambda step: blocks.batch(step, size, seed),
                steps=config.align.steps,
                seed=seed,
                on_progress=update,
            )
            return pruning.prune(config.method, inputs, folder)

    return run.stage("prune", lambda folder: read_json(folder / pruning.METRICS), make)


def _measure_pruned(run: _Run, dense: DenseModel, metrics: dict[str, Any]) -> dict[str, Any]:
    """Perplexity of the dense and the pruned model: a checkpoint, or a change made in memory."""
    folder, method = run.folder.stage("prune"), run.config.method
    runnable, applied = left_on_disk(dense, run.config.load), pruning.PRUNING[method].applied
    results = run.perplexities(runnable, {} if applied else {"pruned": folder / pruning.MODEL})
    if applied:
        change = applied(runnable, **load_file(folder / pruning.TENSORS))
        results["pruned"] = run.perplexity_within(change, method, runnable)
    return results | {"parameters": {"dense": num_parameters(dense.model)}, "pruning": metrics}
