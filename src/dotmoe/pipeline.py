"""`convert`, `finetune` and `prune`: their stages in order, each recorded in the run folder.

convert:   tokenise -> calibrate -> align -> extract (-> repair) -> export -> evaluate -> report
finetune:  tokenise -> finetune or repair -> export -> evaluate -> report
prune:     tokenise -> prune -> evaluate
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import load_file
from torch import Tensor

from dotmoe import baselines, pruning
from dotmoe.align import Alignment, align
from dotmoe.baselines import Baseline
from dotmoe.calibrate import calibrate
from dotmoe.checkpoint import fingerprint
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
from dotmoe.training.folder import Metrics

Result = TypeVar("Result")

_STATE = "state.safetensors"


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
            if run.start(work, config.model, lambda: _model_of(config)):
                return run.conversion()
            dense = load_dense(config.model, config.load)
            split = raise_on_all_ranks(lambda: split_of(config, dense))
            text = run.text(dense, _fewest_tokens(config, dense))
            state = None
            if config.method == "dot_moe" or config.align.steps:
                start = run.state("calibrate", dense, lambda at: _start(run, dense, split, text))
                given = dense, text.training, start, split, config.align, config.assignment

                def trained(**how: Any) -> AlignState:
                    steps = config.align.steps
                    return align(Alignment(*given, seed=config.seed), **how) if steps else start

                aligned = run.trained("align", text, trained)
                state = run.state("align", dense, aligned)
        if not run.is_first:
            return run.conversion()

        def extracted(at: Path) -> Baseline:
            if state is None:
                return _baseline(run, dense, split, text)
            return Baseline(layout=extract(state, split, config.assignment))

        made = run.stage("extract", Baseline.load, extracted, save=Baseline.save)
        if is_divided(dense.model):
            dense = on_disk(dense, dense.device, next(dense.model.parameters()).dtype)
        also: dict[str, Any] = {"steps": 0 if state is None else state.step}
        weights = dense
        if config.repair:
            also["repair"] = run.repair("repair", dense, made.layout, text)
            weights = run.changed("repair")

        def known() -> dict[str, Any]:
            return also | _not_exported(run, dense, made)

        return run.finish(dense, weights, made.layout, text, also=known)


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
            repairs, layout, tokens = config.finetune.train == "repair", source.layout, 0
            training = replace(config.finetune, steps=0) if repairs else config.finetune
            run = _Run(config, converted, training, progress)
            if run.start(work, source.model, lambda: source.fingerprints):
                return run.conversion()
            dense = raise_on_all_ranks(source.origin)
            start = raise_on_all_ranks(source.described) if source.has_own_weights else dense
            split = layout.granularity
            raise_on_all_ranks(lambda: require_exportable(dense, split, config.export))
            if repairs:
                config.repairing.require(split)
                tokens = config.repairing.tokens(split, dense.config)
            text = run.text(dense, tokens, beside=source.text)

            if repairs:
                figures = run.repair("finetune", dense, layout, text)
                also = {"steps": 0, "tokens": figures["tokens"], "repair": figures}
            else:
                given = start, layout, text.training, config.finetune
                origin = dense if source.has_own_weights else None
                tuned = partial(train, *given, seed=config.seed, load=config.load, origin=origin)
                make = run.trained(f"finetune ({config.finetune.train})", text, tuned)
                layout = run.stage("finetune", lambda at: ExpertLayout.load(at / LAYOUT), make)
                steps = training.schedule(text.training.num_blocks).steps
                tokens = steps * training.batch_size * text.training.seq_len
                also = {"steps": steps, "tokens": tokens}
        if not run.is_first:
            return run.conversion()
        if source.has_own_weights and not config.eval_text and source.folder.holds("evaluate"):
            measured = read_json(source.folder.verified("evaluate") / RESULTS)
            also["frozen"] = measured["frozen"]  # of the same text, before the repair
        before = "repaired" if source.has_own_weights else "frozen" if repairs else "converted"
        return run.finish(
            left_on_disk(dense, config.load),
            run.changed("finetune"),
            layout,
            text,
            also=lambda: also,
            beside={before: source.folder} if source.folder.holds("export") else {},
        )


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
        if run.start(work, config.model, lambda: _model_of(config)):
            return run.results()
        dense = describe_dense(config.model)
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

    def start(self, work: ExitStack, model: str, inputs: Callable[[], dict[str, str]]) -> bool:
        """Take the run folder while `work` is open; whether there is nothing more to do.

        `model` and `inputs` are those of `RunFolder.begin`.
        """
        made = "prune" if isinstance(self.config, PruneRunConfig) else "export"

        def start() -> bool:
            work.enter_context(self.folder.at_work(self.config))
            if self.folder.holds(made, "evaluate"):
                self.folder.require_inputs(inputs())
                return True
            if not self.folder.holds("data"):
                texts = (*self.config.eval_text, *self.converted.other_text)
                require_sources(self.converted.data, texts)
            self.folder.begin(self.config, model, inputs())
            return False

        if self.training.steps:
            raise_on_all_ranks(lambda: require_equal_shares(self.training.batch_size))
        return broadcast_from_rank_zero(start)

    def text(self, dense: DenseModel, min_tokens: int, beside: Text | None = None) -> Text:
        """Text to train on and to measure on, written by rank zero alone."""
        converted = self.converted

        def write(at: Path) -> None:
            if converted.other_text:
                asked = (converted.other_text, converted.data)
                write_windows(*asked, dense, at / OTHER, self.config.eval_tokens, self.progress)
            tokenise(
                converted.data,
                converted.sample,
                load_here(dense, self.config.load) if samples_itself(converted.data) else dense,
                at,
                blocks=self.training.steps * self.training.batch_size,
                min_tokens=min_tokens,
                eval_text=self.config.eval_text,
                eval_tokens=self.config.eval_tokens,
                progress=self.progress,
                beside=beside,
            )

        def make(at: Path) -> Text:
            broadcast_from_rank_zero(lambda: write(at))
            return raise_on_all_ranks(lambda: Text.load(at))

        text = self.stage("data", Text.load, make)
        self.texts = {text.heldout_name: text.heldout}
        if other := converted.other_text:
            self.texts[other] = TokenBlocks.load(self.folder.stage("data") / OTHER)
        return text

    def state(self, name: str, dense: DenseModel, make: Callable[[Path], AlignState]) -> AlignState:
        """Affinities and routers of a stage."""
        return self.stage(
            name,
            lambda at: AlignState.load(at / _STATE, dense.device),
            make,
            save=lambda state, at: state.save(at / _STATE),
        )

    def repair(
        self, stage: str, dense: DenseModel, layout: ExpertLayout, text: Text
    ) -> dict[str, Any]:
        """A stage that repairs the dense model's weights under the masks of the layout."""

        def make(at: Path) -> dict[str, Any]:
            whole, config = load_here(dense, self.config.load), self.config.repairing
            with self.progress.bar("repair") as update:
                return repair(whole, layout, text.training, config, folder=at, on_progress=update)

        return self.stage(stage, lambda at: read_json(at / FIGURES), make)

    def changed(self, stage: str) -> DenseModel:
        """The dense checkpoint that a stage has written."""
        return left_on_disk(describe_dense(str(self.folder.stage(stage) / MODEL)), self.config.load)

    def trained(
        self, title: str, text: Text, train: Callable[..., Result]
    ) -> Callable[[Path], Result]:
        """What makes a stage by a training, and shows its steps."""
        shown = [name for name in ("kl", "ce") if getattr(self.training, f"{name}_weight")]
        tokens = self.training.batch_size * text.training.seq_len

        def make(at: Path) -> Result:
            steps = self.training.schedule(text.training.num_blocks, self.progress.log).steps
            with self.progress.bar(title, tokens) as update:

                def on_step(step: int, metrics: Metrics) -> None:
                    update(step, steps, " ".join(f"{name} {metrics[name]:.3f}" for name in shown))

                return train(folder=at, training=self.config.training, on_step=on_step)

        return make

    def finish(
        self,
        dense: DenseModel,
        weights: DenseModel,
        layout: ExpertLayout,
        text: Text,
        *,
        also: Callable[[], dict[str, Any]],
        beside: dict[str, RunFolder] | None = None,
    ) -> Conversion:
        """The checkpoint, verified, and its perplexity with that of the dense model, on a report.

        `weights` is the dense model, or what a stage made of it. Exports of other runs `beside` are
        measured too; `also` is what else is known.
        """
        exported = self.folder.stage("export")

        def make(at: Path) -> ExportRecord:
            tokens_BT, how = text.heldout.tokens_BT, self.config.export
            with self.progress.bar("export") as update:
                return export(weights, layout, at, how, tokens_BT, origin=dense, on_progress=update)

        def measured() -> dict[str, Any]:
            exports = {name: run.stage("export") for name, run in (beside or {}).items()}
            record = ExportRecord.load(exported)
            found = self.perplexities(dense, exports | {"moe": exported})
            table = replace(perplexity_table(found), note=f"Text: {text_names(found['dense'])}.")
            write_model_card(exported, record, table)
            return {
                **found,
                **also(),
                "granularity": asdict(layout.granularity),
                "parameters": record.parameters,
                "verification": record.verification_in_short(),
            }

        self.stage("export", require_checksums, make)
        self.measure(measured)
        return self.conversion()

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
    split = baselines.granularity_of(config.method, _asked(config, dense))
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


def _model_of(config: RunConfig) -> dict[str, str]:
    """Of what a conversion is made: the files of the dense model."""
    return {"model": fingerprint(describe_dense(config.model).folder)}


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
