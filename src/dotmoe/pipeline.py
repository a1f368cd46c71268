"""The whole method: load -> calibrate -> align -> extract -> export -> evaluate -> report."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dotmoe.align import align, steps_to_take
from dotmoe.artifacts import AlignState
from dotmoe.baselines import (
    Baseline,
    SplitInputs,
    baseline,
    routed_by_representatives,
    state_of,
)
from dotmoe.calibrate import calibrate
from dotmoe.config import RunConfig
from dotmoe.data import TokenBlocks
from dotmoe.device import resolved_device
from dotmoe.distributed import from_first, is_first, joined, on_every_rank
from dotmoe.evaluate import heldout_text, perplexities, stock_nats
from dotmoe.evaluate.perplexity import perplexity
from dotmoe.export import (
    ExportRecord,
    export,
    require_intact,
    write_model_card,
)
from dotmoe.extract import extract
from dotmoe.layout import ExpertLayout
from dotmoe.narration import Narrator
from dotmoe.opened_run import OpenedRun
from dotmoe.report import report
from dotmoe.run_folder import provenance, read_json, write_json
from dotmoe.run_results import card_rows, verification_figures
from dotmoe.tokenise import (
    RECORD_FILE,
    load_blocks,
    measured_on,
    tokenise,
)
from dotmoe.training.loop import Metrics, checkpoints_in


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What `convert` leaves behind."""

    folder: Path
    """The run folder."""
    export: Path
    """The checkpoint, loadable by stock Transformers."""
    report: Path
    """What was lost and gained, as one HTML page; `report.md` beside it says it in short."""
    results: dict[str, Any]
    """Contents of `6_evaluate/results.json`; empty on ranks other than the first."""


def convert(config: RunConfig, narrator: Narrator | None = None) -> Conversion:
    """Run every stage that the run folder does not hold finished yet.

    Under torchrun all ranks call it, with a run folder that all of them see. The first alone writes
    in it and speaks, and goes on alone after the alignment, when the others return.

    Raises:
        UserError: Bad input, or another process at work in the run folder. If no stage was
            finished, the folder does not exist then, nor after any other exception.
    """
    with ExitStack() as held:
        with joined(resolved_device(config.load.device)):
            first = is_first()
            run = _Run.of(config, narrator if narrator and first else Narrator(quiet=True))
            from_first(lambda: held.enter_context(run.alone()))
            training, heldout = run.tokenise()
            state = run.learn(training)
        stages = run.folder.path, run.folder.stage("export"), run.folder.stage("report")
        if not first:
            return Conversion(folder=stages[0], export=stages[1], report=stages[2], results={})
        run = run.on_one_rank()
        layout, steps = run.layout(training, state)
        record = run.export(layout, heldout)
        results = run.evaluate(heldout, record, steps)
        return Conversion(folder=stages[0], export=stages[1], report=run.report(), results=results)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run(OpenedRun):
    """One conversion under way: each method is a stage, skipped where its result is on disk."""

    def tokenise(self) -> tuple[TokenBlocks, TokenBlocks]:
        """Training blocks, and blocks to measure on that are never trained on."""
        from_first(self._tokenise)
        return on_every_rank(lambda: load_blocks(self.folder.stage("data")))

    def learn(self, training: TokenBlocks) -> AlignState | None:
        """Learned affinities and routers; None where the method has nothing to learn."""
        if self.config.method != "dot_moe" and not self.config.align.steps:
            return None
        return self.align(training, self.calibrate(training))

    def layout(self, training: TokenBlocks, state: AlignState | None) -> tuple[ExpertLayout, int]:
        """What the method decides, and how many steps it was trained."""
        method = self.config.method
        if state is not None:
            return self.extract(state), state.step
        if not self.folder.is_finished("extract"):
            self.narrator.say(f"{method} has nothing to calibrate or to align: both are skipped")
            with self.folder.finishing("extract") as folder:
                self._split(training).save(folder)
        return Baseline.load(self.folder.intact("extract")).layout, 0

    def calibrate(self, training: TokenBlocks) -> AlignState:
        """Initial affinities and routers."""
        return self._state("calibrate", lambda folder: self._calibrated(training))

    def align(self, training: TokenBlocks, initial: AlignState) -> AlignState:
        """Learned affinities and routers."""
        state = self._state("align", lambda folder: self._aligned(training, initial, folder))
        checkpoints_in(self.folder.stage("align")).remove()
        return state

    def extract(self, state: AlignState) -> ExpertLayout:
        """The layout that is exported."""
        file = self.folder.stage("extract") / "layout.safetensors"
        if not self.folder.is_finished("extract"):
            with self.folder.finishing("extract"):
                layout = extract(
                    state,
                    self.granularity.active_experts,
                    self.config.assignment,
                    router_dtype=self.router_dtype,
                    first_dense_layers=self.granularity.first_dense_layers,
                )
                layout.save(file)
        self.folder.intact("extract")
        return ExpertLayout.load(file)

    def export(self, layout: ExpertLayout, heldout: TokenBlocks) -> ExportRecord:
        """The checkpoint, verified."""
        if self.folder.is_finished("export"):
            require_intact(
                self.folder.stage("export"), read_weights=not self.folder.is_finished("evaluate")
            )
        else:
            self.narrator.say("export and verify")
            self.folder.clear("export")
            with self.folder.finishing("export") as folder:
                export(self.dense, layout, folder, self.config.export, heldout.tokens_BT)
        return ExportRecord.load(self.folder.stage("export"))

    def evaluate(self, heldout: TokenBlocks, record: ExportRecord, steps: int) -> dict[str, Any]:
        """Perplexity of the dense model and of the exported checkpoint; also into its card."""
        file = self.folder.stage("evaluate") / "results.json"
        if not self.folder.is_finished("evaluate"):
            text = measured_on(self.config)
            exported = self.folder.stage("export")
            with self.folder.finishing("evaluate"), self.narrator.bar("evaluate") as update:
                results = perplexities(self.dense, {"moe": exported}, heldout, text, update)
                write_model_card(exported, record, card_rows(results))
                results |= {
                    "origin": "measured",
                    "granularity": asdict(self.granularity),
                    "steps": steps,
                    "parameters": record.parameters,
                    "verification": verification_figures(record.verification),
                    "config": asdict(self.config),
                    "provenance": provenance(self.config.seed),
                }
                results |= self._under_own_router(heldout, text)
                write_json(file, results)
        self.folder.intact("evaluate")
        return read_json(file)

    def report(self) -> Path:
        """What was lost and gained; read from result files alone, so made anew each time."""
        return report(self.folder.path)

    def _tokenise(self) -> None:
        if not self.folder.is_finished("data"):
            with self.folder.finishing("data") as folder:
                record = tokenise(self.config, self.dense, folder, self.narrator)
                write_json(folder / RECORD_FILE, record)
        self.folder.intact("data")

    def _split(self, training: TokenBlocks) -> Baseline:
        """Layout of a method other than DOT-MoE."""
        config = self.config
        rows = -(-config.calibrate.calibration_tokens // training.seq_len)
        inputs = SplitInputs(
            dense=self.dense,
            tokens_BT=training.tokens_BT[:rows],
            granularity=self.granularity,
            config=config.baseline,
            calibrate=config.calibrate,
            seed=config.seed,
        )
        with self.narrator.bar(config.method) as update:
            return baseline(
                config.method, inputs, router_dtype=self.router_dtype, on_progress=update
            )

    def _under_own_router(self, heldout: TokenBlocks, text: tuple[str, ...]) -> dict[str, Any]:
        """Perplexity under the router of the method itself, where the export cannot have it."""
        made = Baseline.load(self.folder.stage("extract"))
        if made.representative_LE is None or self.config.baseline.split_router != "own":
            return {}
        scored = heldout_text(heldout, self.dense.tokenizer, text)
        nats = stock_nats(self.dense.model)
        routed = routed_by_representatives(self.dense, made.layout, made.representative_LE)
        with self.narrator.bar("evaluate its own router") as update, routed:
            result = perplexity(nats, scored, heldout.seq_len, on_progress=update)
        return {"moe_own_router": result.as_dict()}

    def _state(self, stage: str, make: Callable[[Path], AlignState]) -> AlignState:
        """State of a stage: from disk where the stage is finished, else made and saved."""
        file = self.folder.stage(stage) / "state.safetensors"
        if not from_first(lambda: self.folder.is_finished(stage)):
            first = is_first()
            with self.folder.finishing(stage) if first else nullcontext(file.parent) as folder:
                state = make(folder)
                if first:
                    state.save(file)
        from_first(lambda: self.folder.intact(stage))
        return on_every_rank(lambda: AlignState.load(file, self.dense.device))

    def _calibrated(self, training: TokenBlocks) -> AlignState:
        config = self.config
        if config.method != "dot_moe":
            return state_of(self._split(training).layout, self.dense.device)
        with self.narrator.bar(f"calibrate ({config.calibrate.start})") as update:
            return calibrate(
                self.dense,
                training.tokens_BT,
                self.granularity.num_experts,
                config.calibrate,
                seed=config.seed,
                on_progress=update,
            )

    def _aligned(self, training: TokenBlocks, initial: AlignState, folder: Path) -> AlignState:
        config = self.config
        total = steps_to_take(config.align, training.num_blocks)
        if total < config.align.steps:
            self.narrator.say(
                f"steps lowered from {config.align.steps} to {total}: the data would otherwise be "
                f"seen more than {config.align.max_epochs:g} times (max_epochs). With little data "
                "or a small model, --recipe small takes more and smaller steps"
            )
        with self.narrator.bar("align") as update:

            def on_step(step: int, metrics: Metrics) -> None:
                update(step, total, f"kl {metrics['kl']:.3f} ce {metrics['ce']:.3f}")

            return align(
                self.dense,
                training,
                initial,
                self.granularity.active_experts,
                config.align,
                config.assignment,
                folder=folder,
                seed=config.seed,
                first_dense_layers=self.granularity.first_dense_layers,
                training=config.training,
                on_step=on_step,
            )
