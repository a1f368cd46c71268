"""`convert` and `finetune`: their stages in order, each recorded in the run folder.

convert:   tokenise -> calibrate -> align -> extract -> export -> evaluate -> report
finetune:  tokenise -> finetune -> export -> evaluate -> report
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from dotmoe.align import align
from dotmoe.baselines import (
    METHODS,
    Baseline,
    SplitInputs,
    baseline,
    granularity_of,
    routed_by_representatives,
    state_of,
)
from dotmoe.calibrate import calibrate
from dotmoe.checkpoint.folder import checkpoint_folder, fingerprint
from dotmoe.checkpoint.on_disk import on_disk
from dotmoe.config import AnyRunConfig, FinetuneRunConfig, RunConfig
from dotmoe.data import DataConfig
from dotmoe.distributed import (
    broadcast_from_rank_zero,
    is_rank_zero,
    num_ranks,
    process_group,
    raise_on_all_ranks,
    require_equal_shares,
    resolved_device,
    started_by_torchrun,
)
from dotmoe.errors import UserError
from dotmoe.evaluate import heldout_text, perplexities, stock_nats
from dotmoe.evaluate.perplexity import perplexity
from dotmoe.export import (
    ExportConfig,
    ExportRecord,
    Verification,
    export,
    require_exportable,
    require_intact,
    write_model_card,
)
from dotmoe.extract import extract
from dotmoe.files import read_json, write_json
from dotmoe.finetuning import LAYOUT, MODEL, divides_training
from dotmoe.finetuning import finetune as train
from dotmoe.finetuning.lora import require_peft
from dotmoe.finished_run import FinishedRun, finished_run
from dotmoe.granularity import Granularity, resolve
from dotmoe.layout import ExpertLayout
from dotmoe.load import describe_dense, load_dense, resolved_dtype
from dotmoe.models.dense import DenseModel
from dotmoe.moe.assignment import AlignState
from dotmoe.moe.objective import ObjectiveConfig, steps_to_take
from dotmoe.options import check, from_values, values_of
from dotmoe.progress import Progress
from dotmoe.provenance import provenance
from dotmoe.report import report
from dotmoe.report.tables import perplexity_table, text_names
from dotmoe.run_folder import RESULTS, RunFolder
from dotmoe.sharded_weights import is_divided
from dotmoe.tokenise import Text, require_sources, samples_itself, tokenise
from dotmoe.training.loggers import Metrics

Config = TypeVar("Config", bound=AnyRunConfig)
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What `convert` and `finetune` leave behind."""

    folder: Path
    """The run folder."""
    export: Path
    """The checkpoint, loadable by stock Transformers."""
    report: Path
    """What was lost and gained, as one HTML page; `report.md` beside it says it in short."""
    results: dict[str, Any]
    """Contents of `6_evaluate/results.json`; empty on ranks other than rank zero."""


def convert(config: RunConfig, progress: Progress | None = None) -> Conversion:
    """Convert a dense model; stages that the run folder holds finished are not run again.

    Under torchrun all ranks call it, with a run folder that all of them see. Rank zero alone writes
    and prints, and goes on alone after the alignment, when the others return.

    Raises:
        UserError: Bad input, or another process at work in the run folder. If nothing was finished,
            the folder does not exist then, nor after any other exception.
    """
    with ExitStack() as work:
        with process_group(resolved_device(config.load.device)):
            config = raise_on_all_ranks(lambda: settled(config))
            run = _Run.started(config, progress, work)
            if run.is_finished(lambda: {"model": fingerprint(checkpoint_folder(config.model))}):
                return run.conversion()
            run.require_sources(config.data, config.eval_text)
            dense = load_dense(config.model, config.load)
            split = raise_on_all_ranks(lambda: _fitted(config, dense))
            run.begin(config.model, {"model": fingerprint(dense.folder)})
            parts = _Parts(config, dense, split, run.progress)
            text = run.stage("data", Text.load, parts.text, alone=True)
            state = None
            if config.method == "dot_moe" or config.align.steps:
                start = run.state("calibrate", dense, lambda at: parts.start(text))
                state = run.state("align", dense, lambda at: parts.aligned(text, start, at))
        if not run.is_first:
            return run.conversion()
        made = run.stage("extract", Baseline.load, lambda at: parts.extracted(text, state, at))
        if is_divided(dense.model):
            dense = on_disk(dense, dense.device, next(dense.model.parameters()).dtype)
        record = run.export(lambda: dense, made.layout, config.export, text)

        def measured() -> dict[str, Any]:
            results = run.perplexities(dense, {}, record, text)
            steps = 0 if state is None else state.step
            return results | {"steps": steps} | parts.own_router(dense, made, text)

        run.evaluate(made.layout, record, measured)
        return run.conversion()


def finetune(config: FinetuneRunConfig, progress: Progress | None = None) -> Conversion:
    """Train the model of a finished run, and export and measure what came out.

    Otherwise as `convert`; rank zero goes on alone after the training.

    Raises:
        UserError: As `convert`; or RUN is not finished, or is finetuned itself.
    """
    with ExitStack() as work:
        with process_group(resolved_device(config.load.device)):
            config = raise_on_all_ranks(lambda: _checked(config))
            source, converted = raise_on_all_ranks(lambda: _finetunable(config))
            run = _Run.started(config, progress, work)
            inputs = {"model": source.fingerprint, "layout": source.layout_fingerprint}
            if run.is_finished(lambda: inputs):
                return run.conversion()
            run.require_sources(converted.data, config.eval_text)
            dense = raise_on_all_ranks(lambda: _described(source, config))
            run.begin(source.model, inputs)
            known = None if run.holds("data") else _to_sample(converted, config, dense)
            training = config.finetune
            text = run.stage(
                "data",
                Text.load,
                lambda at: tokenise(
                    converted.data,
                    converted.sample,
                    known or dense,
                    at,
                    blocks=training.steps * training.batch_size,
                    eval_text=config.eval_text,
                    eval_tokens=config.eval_tokens,
                    progress=run.progress,
                    beside=source.text,
                ),
                alone=True,
            )
            layout = run.stage(
                "finetune",
                lambda at: ExpertLayout.load(at / LAYOUT),
                lambda at: _trained(run, config, source, dense, text, at),
            )
        if not run.is_first:
            return run.conversion()
        model = str(run.folder.stage("finetune") / MODEL)
        record = run.export(
            lambda: _for_one_rank(model, config, dense), layout, config.export, text, dense
        )
        steps = steps_to_take(config.finetune, text.training.num_blocks)

        def measured() -> dict[str, Any]:
            exports = {}
            if source.folder.holds("export"):
                exports["converted"] = source.folder.stage("export")
            results = run.perplexities(
                _for_one_rank(source.model, config, dense), exports, record, text
            )
            tokens = steps * config.finetune.batch_size * text.training.seq_len
            return results | {"steps": steps, "tokens": tokens}

        run.evaluate(layout, record, measured)
        return run.conversion()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A run under way, and the stages that both commands end with."""

    config: AnyRunConfig
    folder: RunFolder
    progress: Progress
    is_first: bool

    @classmethod
    def started(cls, config: AnyRunConfig, progress: Progress | None, work: ExitStack) -> Self:
        """Take the run folder, for as long as `work` is open; all ranks together."""
        first = is_rank_zero()
        progress = progress if progress and first else Progress(quiet=True)
        folder = RunFolder(Path(config.out), progress.log)
        broadcast_from_rank_zero(lambda: work.enter_context(folder.at_work(config)))
        return cls(config=config, folder=folder, progress=progress, is_first=first)

    def holds(self, *names: str) -> bool:
        """Whether these stages are finished."""
        return broadcast_from_rank_zero(lambda: self.folder.holds(*names))

    def is_finished(self, inputs: Callable[[], dict[str, str]]) -> bool:
        """Whether nothing is left to do, of a run that was made of the same inputs."""
        finished = self.holds("export", "evaluate")
        if finished:
            broadcast_from_rank_zero(lambda: self.folder.require_inputs(inputs()))
        return finished

    def require_sources(self, data: DataConfig, eval_text: tuple[str, ...]) -> None:
        """Refuse texts that are not there, if they are still to be read."""
        if not self.holds("data"):
            broadcast_from_rank_zero(lambda: require_sources(data, eval_text))

    def begin(self, model: str, inputs: dict[str, str]) -> None:
        """Record what the run is made of."""
        broadcast_from_rank_zero(lambda: self.folder.begin(self.config, model, inputs))

    def stage(
        self,
        name: str,
        load: Callable[[Path], Result],
        make: Callable[[Path], Result],
        *,
        alone: bool = False,
    ) -> Result:
        """See `RunFolder.run_stage`."""
        return self.folder.run_stage(name, load, make, alone=alone)

    def state(self, name: str, dense: DenseModel, make: Callable[[Path], AlignState]) -> AlignState:
        """Affinities and routers of a stage."""
        file = "state.safetensors"

        def saved(at: Path) -> AlignState:
            state = make(at)
            broadcast_from_rank_zero(lambda: state.save(at / file) if is_rank_zero() else None)
            return state

        return self.stage(name, lambda at: AlignState.load(at / file, dense.device), saved)

    def export(
        self,
        dense: Callable[[], DenseModel],
        layout: ExpertLayout,
        config: ExportConfig,
        text: Text,
        origin: DenseModel | None = None,
    ) -> ExportRecord:
        """The checkpoint, verified; `origin` as for `dotmoe.export.export`."""

        def load(at: Path) -> ExportRecord:
            require_intact(at)
            return ExportRecord.load(at)

        def make(at: Path) -> ExportRecord:
            self.progress.log("export and verify")
            return export(dense(), layout, at, config, text.heldout.tokens_BT, origin=origin)

        return self.stage("export", load, make)

    def perplexities(
        self, dense: DenseModel, exports: dict[str, Path], record: ExportRecord, text: Text
    ) -> dict[str, Any]:
        """Perplexity of the dense model and of exports, this run's last; also into its card."""
        exported = self.folder.stage("export")
        with self.progress.bar("evaluate") as update:
            results = perplexities(
                dense, exports | {"moe": exported}, text.heldout, text.heldout_name, update
            )
        text_note = f"Text: {text_names(results['dense'])}."
        write_model_card(exported, record, replace(perplexity_table(results), note=text_note))
        return results

    def evaluate(
        self, layout: ExpertLayout, record: ExportRecord, measure: Callable[[], dict[str, Any]]
    ) -> None:
        """Write what was measured, and where it comes from."""

        def make(at: Path) -> dict[str, Any]:
            results = measure() | {
                "origin": "measured",
                "granularity": asdict(layout.granularity),
                "parameters": record.parameters,
                "verification": _verification(record.verification),
                "config": values_of(self.config),
                "provenance": provenance(self.config.seed),
            }
            write_json(at / RESULTS, results)
            return results

        self.stage("evaluate", lambda at: read_json(at / RESULTS), make)

    def conversion(self) -> Conversion:
        """What is left behind; the report is made anew each time, from result files alone."""
        path, exported = self.folder.path, self.folder.stage("export")
        page, results = self.folder.stage("report") / "report.html", {}
        if self.is_first:
            results = read_json(self.folder.verified("evaluate") / RESULTS)
            require_intact(exported, read_weights=False)
            page = report(path)
        return Conversion(folder=path, export=exported, report=page, results=results)


# --- before the first stage -------------------------------------------------------------------


def settled(config: RunConfig) -> RunConfig:
    """The config, checked, with what `method` decides for the alignment phase written out.

    A method other than DOT-MoE keeps its experts; its router is trained for `router_steps`.

    Raises:
        UserError: A number out of its range, steps for a method whose shared expert the alignment
            phase does not know, or ranks that cannot share the work.
    """
    config = _checked(config)
    if config.method != "dot_moe":
        if num_ranks() > 1:
            raise UserError(
                f"method is {config.method}, which runs in one process, and torchrun started "
                f"{num_ranks()}. Start without torchrun."
            )
        steps = config.baseline.router_steps
        if steps and METHODS[config.method].has_shared_expert:
            raise UserError(
                f"router_steps is {steps}, but {config.method} has a shared expert, which the "
                "alignment phase does not train beside. Set router_steps to 0."
            )
        config = replace(config, align=replace(config.align, steps=steps, learn_assignment=False))
    if config.align.steps:
        require_equal_shares(config.align.batch_size)
    return config


def _checked(config: Config) -> Config:
    """The config with its values in range, and of the types that its fields name."""
    config = from_values(type(config), values_of(config), "the config")
    check(config)
    return config


def _fitted(config: RunConfig, dense: DenseModel) -> Granularity:
    """Experts that fit the model and the export."""
    if is_divided(dense.model) and samples_itself(config.data):
        raise UserError(_NOT_WHOLE)
    split = resolve(config.experts, dense.widths.ffn)
    split = granularity_of(config.method, split, config.baseline)
    require_exportable(dense, split, config.export)
    return split


def _finetunable(config: FinetuneRunConfig) -> tuple[FinishedRun, RunConfig]:
    """The run that is finetuned, and its config with the text of the finetune."""
    if config.finetune.train == "lora":
        require_peft()
    require_equal_shares(config.finetune.batch_size)
    source = finished_run(Path(config.run))
    if not isinstance(source.config, RunConfig):
        raise UserError(
            f"{config.run} is finetuned already. Name the run of dotmoe convert that it "
            "was made of, and train for more steps."
        )
    data = config.data
    if not data.data:
        data = replace(source.config.data, seq_len=data.seq_len)
    return source, replace(source.config, data=data)


def _described(source: FinishedRun, config: FinetuneRunConfig) -> DenseModel:
    """The dense model of a run, without weights, if it is the same and can be exported."""
    dense = describe_dense(source.model)
    source.require_same_model(dense.folder)
    require_exportable(dense, source.layout.granularity, config.export)
    return dense


# --- stages of convert ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Parts:
    """The stages of a conversion, and what they have in common."""

    config: RunConfig
    dense: DenseModel
    split: Granularity
    progress: Progress

    def text(self, at: Path) -> Text:
        """Text to train on and to measure on."""
        config = self.config
        return tokenise(
            config.data,
            config.sample,
            self.dense,
            at,
            blocks=config.align.steps * config.align.batch_size,
            min_tokens=config.calibrate.calibration_tokens,
            eval_text=config.eval_text,
            eval_tokens=config.eval_tokens,
            progress=self.progress,
        )

    def start(self, text: Text) -> AlignState:
        """Initial affinities and routers."""
        config = self.config
        if config.method != "dot_moe":
            return state_of(self._split(text).layout, self.dense.device)
        with self.progress.bar(f"calibrate ({config.calibrate.start})") as update:
            return calibrate(
                self.dense,
                text.training.tokens_BT,
                self.split.num_experts,
                config.calibrate,
                seed=config.seed,
                on_progress=update,
            )

    def aligned(self, text: Text, start: AlignState, at: Path) -> AlignState:
        """Learned affinities and routers."""
        config = self.config
        steps = _steps(config.align, text, self.progress)
        with self.progress.bar("align") as update:

            def on_step(step: int, metrics: Metrics) -> None:
                update(step, steps, f"kl {metrics['kl']:.3f} ce {metrics['ce']:.3f}")

            return align(
                self.dense,
                text.training,
                start,
                self.split,
                config.align,
                config.assignment,
                folder=at,
                seed=config.seed,
                training=config.training,
                on_step=on_step,
            )

    def extracted(self, text: Text, state: AlignState | None, at: Path) -> Baseline:
        """The layout that is exported."""
        config = self.config
        if state is None:
            self.progress.log(
                f"{config.method} has nothing to calibrate or to align: both are skipped"
            )
            made = self._split(text)
        else:
            layout = extract(state, self.split, config.assignment)
            made = Baseline(layout=layout, representative_LE=None)
        made.save(at)
        return made

    def _split(self, text: Text) -> Baseline:
        """Experts and router of a method other than DOT-MoE."""
        config = self.config
        rows = -(-config.calibrate.calibration_tokens // text.training.seq_len)
        inputs = SplitInputs(
            dense=self.dense,
            tokens_BT=text.training.tokens_BT[:rows],
            granularity=self.split,
            config=config.baseline,
            calibrate=config.calibrate,
            seed=config.seed,
        )
        with self.progress.bar(config.method) as update:
            return baseline(config.method, inputs, on_progress=update)

    def own_router(self, dense: DenseModel, made: Baseline, text: Text) -> dict[str, Any]:
        """Perplexity under the router of the method itself, where the export cannot have it."""
        if made.representative_LE is None or self.config.baseline.split_router != "own":
            return {}
        scored = heldout_text(text.heldout, dense.tokenizer, text.heldout_name)
        nats = stock_nats(dense.model)
        routed = routed_by_representatives(dense, made.layout, made.representative_LE)
        with self.progress.bar("evaluate its own router") as update, routed:
            result = perplexity(nats, scored, text.heldout.seq_len, on_progress=update)
        return {"moe_own_router": result.as_dict()}


# --- stages of finetune -----------------------------------------------------------------------


def _to_sample(
    converted: RunConfig, config: FinetuneRunConfig, dense: DenseModel
) -> DenseModel | None:
    """The dense model to sample text from, if that is asked for; all ranks together."""
    if not samples_itself(converted.data):
        return None
    if started_by_torchrun() and divides_training(dense, config.finetune, config.load):
        raise UserError(_NOT_WHOLE)
    return load_dense(converted.model, replace(config.load, sharding="replicate"))


def _trained(
    run: _Run,
    config: FinetuneRunConfig,
    source: FinishedRun,
    dense: DenseModel,
    text: Text,
    at: Path,
) -> ExpertLayout:
    """Write trained weights as a dense checkpoint, and the layout with trained routers."""
    steps = _steps(config.finetune, text, run.progress)
    with run.progress.bar(f"finetune ({config.finetune.train})") as update:

        def on_step(step: int, metrics: Metrics) -> None:
            update(step, steps, f"ce {metrics['ce']:.3f}")

        finetuned = train(
            dense,
            source.layout,
            text.training,
            config.finetune,
            folder=at,
            seed=config.seed,
            load=config.load,
            training=config.training,
            on_step=on_step,
        )
    return finetuned.layout


def _for_one_rank(source: str, config: FinetuneRunConfig, dense: DenseModel) -> DenseModel:
    """A checkpoint of the dense model's sizes; one too large for one rank stays on disk."""
    if started_by_torchrun() and divides_training(dense, config.finetune, config.load):
        device = resolved_device(config.load.device)
        return on_disk(describe_dense(source), device, resolved_dtype(config.load.dtype, device))
    return load_dense(source, replace(config.load, sharding="replicate"))


# --- words and records ------------------------------------------------------------------------

_NOT_WHOLE = (
    "data is self, but text is sampled by one rank, from a model that is whole. Choose "
    "--sharding replicate, or tokenise before in a run of one rank with the same OUT."
)


def _steps(config: ObjectiveConfig, text: Text, progress: Progress) -> int:
    """Steps that will be taken; fewer than asked for are said."""
    steps = steps_to_take(config, text.training.num_blocks)
    if steps < config.steps:
        progress.log(
            f"steps lowered from {config.steps} to {steps}: the data would otherwise be seen more "
            f"than {config.max_epochs:g} times (max_epochs). With little data or a small model, "
            "--recipe small takes more and smaller steps"
        )
    return steps


def _verification(record: Verification | None) -> dict[str, Any]:
    """The export's verification in a few numbers: the worst layer, and the whole model."""
    assert record is not None
    return {
        "tokens": record.tokens,
        "dtype": record.dtype,
        "largest_block_error": max(layer.block_error for layer in record.layers),
        "largest_misrouted_share": max(layer.misrouted for layer in record.layers),
        "logits_error": record.logits_error,
        "top1_agreement": record.top1_agreement,
        "all_experts_logits_error": record.dense_error,
    }
