"""`convert`, `finetune` and `prune`: their stages in order, each recorded in the run folder.

convert:   tokenise -> calibrate -> align -> extract (-> repair) -> export -> evaluate -> report
finetune:  tokenise -> finetune or repair -> export -> evaluate -> report
prune:     tokenise -> prune -> evaluate
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from dotmoe import baselines, pruning
from dotmoe.align import Alignment, align
from dotmoe.baselines import Baseline
from dotmoe.calibrate import calibrate
from dotmoe.checkpoint import checkpoint_folder, fingerprint
from dotmoe.checkpoint.on_disk import on_disk
from dotmoe.config import FinetuneRunConfig, PruneRunConfig, RunConfig
from dotmoe.data import TokenBlocks
from dotmoe.distributed import (
    broadcast_from_rank_zero,
    is_rank_zero,
    process_group,
    raise_on_all_ranks,
    require_equal_shares,
    require_one_process,
    resolved_device,
)
from dotmoe.errors import UserError, require_package
from dotmoe.evaluate.perplexity import (
    heldout_perplexity,
    perplexities,
    perplexity_table,
    text_names,
)
from dotmoe.export import export, require_exportable
from dotmoe.export.record import ExportRecord, require_checksums, write_model_card
from dotmoe.files import read_json, write_json
from dotmoe.finetuning import LAYOUT, MODEL
from dotmoe.finetuning import finetune as train
from dotmoe.finetuning.repair import FIGURES, repair
from dotmoe.finished_run import FinishedRun
from dotmoe.granularity import Granularity, count_parameters, splits_of
from dotmoe.layout import AlignState, ExpertLayout, extract
from dotmoe.load import describe_dense, is_divided, left_on_disk, load_dense, load_here
from dotmoe.models.family import DenseModel, num_parameters
from dotmoe.moe.masked import masked_by
from dotmoe.moe.objective import ObjectiveConfig
from dotmoe.options import checked, values_of
from dotmoe.progress import Progress
from dotmoe.report.page import html_report
from dotmoe.run_folder import RESULTS, RunFolder, provenance
from dotmoe.tokenise import OTHER, Text, require_sources, samples_itself, tokenise, write_windows
from dotmoe.training.folder import Metrics, OnStep


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
            config = raise_on_all_ranks(lambda: checked(config).settled())
            run = _Run(config, config, config.align, progress)
            if run.start(work, lambda: _model_of(checkpoint_folder(config.model))):
                return run.conversion()
            dense = load_dense(config.model, config.load)
            split = raise_on_all_ranks(lambda: split_of(config, dense))
            run.folder.begin(config, config.model, _model_of(dense.folder))
            text = run.text(dense, _fewest_tokens(config, dense))
            state = None
            if config.method == "dot_moe" or config.align.steps:
                start = run.state("calibrate", dense, lambda at: _start(run, dense, split, text))

                def aligned(at: Path) -> AlignState:
                    task = Alignment(
                        dense,
                        text.training,
                        start,
                        split,
                        config.align,
                        config.assignment,
                        seed=config.seed,
                    )
                    with run.steps("align", text) as on_step:
                        return align(task, at, config.training, on_step)

                state = run.state("align", dense, aligned)
        if not run.is_first:
            return run.conversion()

        def extracted(at: Path) -> Baseline:
            if state is None:
                made = _baseline(run, dense, split, text)
            else:
                made = Baseline(layout=extract(state, split, config.assignment))
            made.save(at)
            return made

        made = run.stage("extract", Baseline.load, extracted)
        if is_divided(dense.model):
            dense = on_disk(dense, dense.device, next(dense.model.parameters()).dtype)
        weights = dense
        if config.repair:
            run.repair("repair", dense, made.layout, text)
            weights = run.changed("repair")
        steps = {"steps": 0 if state is None else state.step}
        run.export(weights, made.layout, text, origin=dense)
        run.evaluate(dense, made.layout, also=lambda: steps | _not_exported(run, dense, made))
        return run.conversion()


def finetune(config: FinetuneRunConfig, progress: Progress | None = None) -> Conversion:
    """Train the model of a finished run, and export and measure what came out.

    Otherwise as `convert`; rank zero goes on alone after the training.

    Raises:
        UserError: As `convert`; or RUN is not finished, or is finetuned itself.
    """
    with ExitStack() as work:
        with process_group(resolved_device(config.load.device)):
            config = raise_on_all_ranks(lambda: checked(config))
            source, converted = raise_on_all_ranks(lambda: _source(config))
            repairs = config.finetune.train == "repair"
            training = replace(config.finetune, steps=0) if repairs else config.finetune
            run = _Run(config, converted, training, progress)
            if run.start(work, lambda: source.fingerprints):
                return run.conversion()
            dense = raise_on_all_ranks(source.origin)
            start = raise_on_all_ranks(source.described) if source.has_own_weights else dense
            layout, tokens = source.layout, 0
            split = layout.granularity
            raise_on_all_ranks(lambda: require_exportable(dense, split, config.export))
            if repairs:
                raise_on_all_ranks(lambda: config.repairing.require(split))
                tokens = config.repairing.tokens(split, dense.config)
            run.folder.begin(config, source.model, source.fingerprints)
            text = run.text(dense, tokens, beside=source.text)

            def trained(at: Path) -> ExpertLayout:
                with run.steps(f"finetune ({config.finetune.train})", text) as on_step:
                    return train(
                        start,
                        source.layout,
                        text.training,
                        config.finetune,
                        folder=at,
                        seed=config.seed,
                        load=config.load,
                        origin=dense if source.has_own_weights else None,
                        training=config.training,
                        on_step=on_step,
                    )

            if repairs:
                run.repair("finetune", dense, layout, text)
            else:
                layout = run.stage("finetune", lambda at: ExpertLayout.load(at / LAYOUT), trained)
        if not run.is_first:
            return run.conversion()
        run.export(run.changed("finetune"), layout, text, origin=dense)
        before = "repaired" if source.has_own_weights else "frozen" if repairs else "converted"
        steps = training.schedule(text.training.num_blocks).steps
        tokens = steps * training.batch_size * text.training.seq_len
        also: dict[str, Any] = {"steps": steps, "tokens": tokens}
        if repairs:
            figures = read_json(run.folder.stage("finetune") / FIGURES)
            also |= {"tokens": figures["tokens"], "repair": figures}
        if source.has_own_weights and not config.eval_text and source.folder.holds("evaluate"):
            measured = read_json(source.folder.verified("evaluate") / RESULTS)
            also["frozen"] = measured["frozen"]  # of the same text, before the repair
        run.evaluate(
            left_on_disk(dense, config.load),
            layout,
            beside={before: source.folder} if source.folder.holds("export") else {},
            also=lambda: also,
        )
        return run.conversion()


def prune(config: PruneRunConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Prune a dense model by a published method, write a stock checkpoint of it, and measure that.

    Returns:
        Contents of `6_evaluate/results.json`: perplexity of `dense` and of what is `pruned`,
        `parameters` of the first, and `pruning`, see `dotmoe.pruning.prune`.

    Raises:
        UserError: As `convert`; or the method does not fit the model.
    """
    config = checked(config)
    run = _Run(config, config, config.align, progress)
    with ExitStack() as work:
        inputs = _model_of(checkpoint_folder(config.model))
        if run.start(work, lambda: inputs, "prune"):
            return run.results()
        dense = describe_dense(config.model)
        run.folder.begin(config, config.model, inputs)
        tokens, batch_size = config.calibrate.tokens(dense.widths.model), config.align.batch_size
        text = run.text(dense, tokens)

        def pruned(at: Path) -> dict[str, Any]:
            with run.progress.bar(config.method) as update:
                inputs = pruning.PruneInputs(
                    dense=load_dense(config.model, config.load),
                    tokens_BT=text.training.drawn(tokens),
                    wanted=budget_of(config, dense),
                    batch=lambda step: text.training.batch(step, batch_size, config.seed),
                    steps=config.align.steps,
                    seed=config.seed,
                    on_progress=update,
                    log=lambda said: run.progress.log(f"{config.method}: {said}"),
                )
                return pruning.prune(config.method, inputs, at)

        figures = run.stage("prune", lambda at: read_json(at / pruning.FIGURES), pruned)

        def measured() -> dict[str, Any]:
            folder, runnable = run.folder.stage("prune"), left_on_disk(dense, config.load)
            applied = pruning.PRUNING[config.method].applied
            exports = {} if applied else {"pruned": folder / pruning.MODEL}
            found = run.perplexities(runnable, exports)
            if applied:
                changed = applied(runnable, **load_file(folder / pruning.TENSORS))
                found["pruned"] = run.measured(config.method, runnable, changed)
            parameters = {"dense": num_parameters(dense.model)}
            return {**found, "parameters": parameters, "pruning": figures}

        run.measure(measured)
        return run.results()


class _Run:
    """A run under way, and what all three commands do alike."""

    texts: dict[tuple[str, ...], TokenBlocks]
    """What perplexity is measured on, by name: held-out text, and another if one is asked for."""

    def __init__(
        self,
        config: Any,
        converted: RunConfig,
        training: ObjectiveConfig,
        progress: Progress | None,
    ) -> None:
        self.config = config
        self.converted = converted
        """The config of the conversion, whose sources of text are read."""
        self.training = training
        self.is_first = is_rank_zero()
        self.progress = progress if progress and self.is_first else Progress(quiet=True)
        self.folder = RunFolder(Path(config.out), self.progress.log)
        self.stage = self.folder.run_stage

    def start(
        self, work: ExitStack, inputs: Callable[[], dict[str, str]], made: str = "export"
    ) -> bool:
        """Take the run folder while `work` is open; whether `made` and its evaluation are done."""

        def start() -> bool:
            work.enter_context(self.folder.at_work(self.config))
            if self.folder.holds(made, "evaluate"):
                self.folder.require_inputs(inputs())
                return True
            if not self.folder.holds("data"):
                texts = (*self.config.eval_text, *self.converted.other_text)
                require_sources(self.converted.data, texts)
            return False

        if self.training.steps:
            raise_on_all_ranks(lambda: require_equal_shares(self.training.batch_size))
        return broadcast_from_rank_zero(start)

    def text(self, dense: DenseModel, min_tokens: int, beside: Text | None = None) -> Text:
        """Text to train on and to measure on."""
        converted = self.converted

        def make(at: Path) -> Text:
            is_whole = dense.device.type != "meta" and not is_divided(dense.model)
            loads = samples_itself(converted.data) and not is_whole
            if converted.other_text:
                asked = (converted.other_text, converted.data)
                write_windows(*asked, dense, at / OTHER, self.config.eval_tokens, self.progress)
            return tokenise(
                converted.data,
                converted.sample,
                load_here(dense, self.config.load) if loads else dense,
                at,
                blocks=self.training.steps * self.training.batch_size,
                min_tokens=min_tokens,
                eval_text=self.config.eval_text,
                eval_tokens=self.config.eval_tokens,
                progress=self.progress,
                beside=beside,
            )

        text = self.stage("data", Text.load, make, alone=True)
        self.texts = {text.heldout_name: text.heldout}
        if other := converted.other_text:
            self.texts[other] = TokenBlocks.load(self.folder.stage("data") / OTHER)
        return text

    def state(self, name: str, dense: DenseModel, make: Callable[[Path], AlignState]) -> AlignState:
        """Affinities and routers of a stage."""
        file = "state.safetensors"

        def saved(at: Path) -> AlignState:
            state = make(at)
            broadcast_from_rank_zero(lambda: state.save(at / file))
            return state

        return self.stage(name, lambda at: AlignState.load(at / file, dense.device), saved)

    def repair(self, stage: str, dense: DenseModel, layout: ExpertLayout, text: Text) -> None:
        """A stage that repairs the dense model's weights under the masks of the layout."""

        def make(at: Path) -> dict[str, Any]:
            whole = load_here(dense, self.config.load) if dense.device.type == "meta" else dense
            config = self.config.repairing
            with self.progress.bar("repair") as update:
                return repair(whole, layout, text.training, config, folder=at, on_progress=update)

        self.stage(stage, lambda at: read_json(at / FIGURES), make)

    def changed(self, stage: str) -> DenseModel:
        """The dense checkpoint that a stage has written."""
        return left_on_disk(describe_dense(str(self.folder.stage(stage) / MODEL)), self.config.load)

    @contextmanager
    def steps(self, title: str, text: Text) -> Iterator[OnStep]:
        """Shows the steps of a training."""
        steps = self.training.schedule(text.training.num_blocks, self.progress.log).steps
        shown = [name for name in ("kl", "ce") if getattr(self.training, f"{name}_weight")]
        tokens = self.training.batch_size * text.training.seq_len
        with self.progress.bar(title, tokens) as update:

            def on_step(step: int, metrics: Metrics) -> None:
                update(step, steps, " ".join(f"{name} {metrics[name]:.3f}" for name in shown))

            yield on_step

    def export(
        self, dense: DenseModel, layout: ExpertLayout, text: Text, origin: DenseModel
    ) -> None:
        """The checkpoint, verified; `origin` as for `dotmoe.export.export`."""

        def make(at: Path) -> ExportRecord:
            tokens_BT, how = text.heldout.tokens_BT, self.config.export
            with self.progress.bar("export") as update:
                return export(dense, layout, at, how, tokens_BT, origin=origin, on_progress=update)

        self.stage("export", require_checksums, make)

    def evaluate(
        self,
        dense: DenseModel,
        layout: ExpertLayout,
        *,
        also: Callable[[], dict[str, Any]],
        beside: dict[str, RunFolder] | None = None,
    ) -> None:
        """Perplexity of the dense model and of exports, this run's last; also into its card."""

        def measured() -> dict[str, Any]:
            runs = {**(beside or {}), "moe": self.folder}
            exports = {name: run.stage("export") for name, run in runs.items()}
            record = ExportRecord.load(exports["moe"])
            found = self.perplexities(dense, exports)
            table = replace(perplexity_table(found), note=f"Text: {text_names(found['dense'])}.")
            write_model_card(exports["moe"], record, table)
            return {
                **found,
                **also(),
                "granularity": asdict(layout.granularity),
                "parameters": record.parameters,
                "verification": record.verification_in_short(),
            }

        self.measure(measured)

    def measure(self, measured: Callable[[], dict[str, Any]]) -> None:
        """The evaluate stage: what is measured, and where it comes from."""

        def make(at: Path) -> None:
            about = {"origin": "measured", "config": values_of(self.config)}
            about |= {"provenance": provenance(self.config.seed)}
            write_json(at / RESULTS, measured() | about)

        self.stage("evaluate", lambda at: None, make)

    def results(self) -> dict[str, Any]:
        """What the evaluate stage has written."""
        return read_json(self.folder.verified("evaluate") / RESULTS)

    def perplexities(self, dense: DenseModel, exports: dict[str, Path]) -> dict[str, Any]:
        """Perplexity of the dense model and of exports, by name."""
        with self.progress.bar("evaluate", tokens=1) as update:
            return perplexities(dense, exports, self.texts, update)

    def measured(
        self, name: str, dense: DenseModel, changed: AbstractContextManager[None]
    ) -> dict[str, Any]:
        """Perplexity of what a dense model in memory is inside `changed`."""
        with self.progress.bar(f"evaluate {name}", tokens=1) as update, changed:
            return heldout_perplexity(dense.model, dense.tokenizer, self.texts, update)

    def conversion(self) -> Conversion:
        """What is left behind; the report is made anew each time, from result files alone."""
        path, exported = self.folder.path, self.folder.stage("export")
        page, results = self.folder.stage("report") / "report.html", {}
        if self.is_first:
            results = self.results()
            require_checksums(exported, read_weights=False)
            page = html_report(path)
        return Conversion(folder=path, export=exported, report=page, results=results)


def split_of(config: RunConfig, dense: DenseModel) -> Granularity:
    """Experts of a conversion; refused if the model, all exports or the repair cannot have them."""
    split = baselines.granularity_of(config.method, _asked(config, dense), config.baseline)
    require_exportable(dense, split, config.export)
    if config.repair:
        config.repairing.require(split)
    return split


def budget_of(config: RunConfig, dense: DenseModel) -> int:
    """Parameters that work on one token of a conversion with these experts, without routers."""
    return count_parameters(dense.config, dense.family, _asked(config, dense)).active


def _asked(config: RunConfig, dense: DenseModel) -> Granularity:
    """The split that was asked for, before a method has its say."""
    return splits_of(config.experts, dense.widths.ffn, dense.config.num_attention_heads)


def _model_of(folder: Path) -> dict[str, str]:
    """Of what a conversion is made: the files of the dense model."""
    return {"model": fingerprint(folder)}


def _fewest_tokens(config: RunConfig, dense: DenseModel) -> int:
    """Tokens of training text that calibration and repair ask for."""
    split = _asked(config, dense)
    repair = config.repairing.tokens(split, dense.config) if config.repair else 0
    at_random = config.method == "dot_moe" and config.calibrate.start == "random"
    return max(0 if at_random else config.calibrate.tokens(dense.widths.model), repair)


def _start(run: _Run, dense: DenseModel, split: Granularity, text: Text) -> AlignState:
    """Initial affinities and routers."""
    if run.config.method != "dot_moe":
        return baselines.state_of(_baseline(run, dense, split, text).layout, dense.device)
    config, seed = run.config.calibrate, run.config.seed
    with run.progress.bar(f"calibrate ({config.start})") as update:
        return calibrate(dense, text.training, split, config, seed=seed, on_progress=update)


def _baseline(run: _Run, dense: DenseModel, split: Granularity, text: Text) -> Baseline:
    """Experts and router of a method other than DOT-MoE."""
    config = run.config
    inputs = baselines.SplitInputs(
        dense=dense,
        tokens_BT=text.training.drawn(config.calibrate.tokens(dense.widths.model)),
        granularity=split,
        config=config.baseline,
        calibrate=config.calibrate,
        seed=config.seed,
    )
    with run.progress.bar(config.method) as update:
        return baselines.baseline(config.method, inputs, on_progress=update)


def _not_exported(run: _Run, dense: DenseModel, made: Baseline) -> dict[str, Any]:
    """Perplexity before a repair, and under the method's own router if no export can have it."""
    found = {}
    if run.config.repair:
        frozen = masked_by(dense, made.layout)
        found["frozen"] = run.measured("what was repaired", dense, frozen)
        found["repair"] = read_json(run.folder.stage("repair") / FIGURES)
    if made.own and run.config.baseline.split_router == "own":
        shares = list[Tensor]()
        routed = baselines.routed_by_own(run.config.method, dense, made, shares)
        found["moe_own_router"] = run.measured("its own router", dense, routed)
        layers = len(made.layout.moe_layers)
        found["moe_own_router"]["active"] = baselines.active_share(shares, layers)
    return found


def _source(config: FinetuneRunConfig) -> tuple[FinishedRun, RunConfig]:
    """The run that is finetuned, and its config with the text of the finetune."""
    if config.finetune.train == "lora":
        require_package("peft", "lora", "train lora")
    if config.finetune.train == "repair":
        require_one_process("a repair")
    source = FinishedRun(Path(config.run))
    if not isinstance(source.config, RunConfig):
        raise UserError(
            f"{config.run} is finetuned already. Name the run of dotmoe convert before it."
        )
    if source.has_own_weights and config.finetune.train == "repair":
        raise UserError(f"{config.run} is repaired already. Name a run converted without --repair.")
    if source.layout.of_target("attention") and config.finetune.train != "repair":
        raise UserError(
            f"train is {config.finetune.train}, but {config.run} has experts made of heads, which "
            "can be repaired and not yet trained further. Set --train repair."
        )
    data = replace(source.config.data, seq_len=config.data.seq_len)
    return source, replace(source.config, data=config.data if config.data.data else data)
