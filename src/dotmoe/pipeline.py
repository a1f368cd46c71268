"""The whole method: load -> calibrate -> align -> extract -> export -> evaluate -> report."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dotmoe.align import align, steps_to_take
from dotmoe.artifacts import AlignState, DenseModel
from dotmoe.calibrate import calibrate
from dotmoe.checkpoint_folder import fingerprint
from dotmoe.config import RunConfig, check
from dotmoe.data import TokenBlocks, documents, pack_blocks
from dotmoe.evaluate import evaluate_pair
from dotmoe.export import (
    ExportRecord,
    VerificationRecord,
    export,
    require_exportable,
    write_model_card,
)
from dotmoe.extract import extract
from dotmoe.granularity import Granularity, resolve
from dotmoe.layout import ExpertLayout
from dotmoe.load import load_dense
from dotmoe.narration import Narrator
from dotmoe.report import report
from dotmoe.run_folder import RunFolder, provenance, read_json, write_json
from dotmoe.training.loop import Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What `convert` leaves behind."""

    folder: Path
    """The run folder."""
    export: Path
    """The checkpoint, loadable by stock Transformers."""
    report: Path
    """What was lost and gained, as Markdown."""
    results: dict[str, Any]
    """Contents of `6_evaluate/results.json`."""


def convert(config: RunConfig, narrator: Narrator | None = None) -> Conversion:
    """Run every stage that the run folder does not hold finished yet.

    Raises:
        UserError: Bad input, or another process at work in the run folder. If no stage was
            finished, the folder does not exist then, nor after any other exception.
    """
    narrator = narrator or Narrator(quiet=True)
    check(config)
    RunFolder.require_usable(config)
    if not RunFolder(Path(config.out)).is_finished("data"):
        _require_sources(config)
    dense = load_dense(config.model, config.load)
    granularity = resolve(config.experts, dense.widths.ffn)
    run = _Run(
        config=config,
        dense=dense,
        granularity=granularity,
        router_dtype=require_exportable(dense, granularity, config.export),
        folder=RunFolder.open(config),
        narrator=narrator,
    )
    with run.folder.alone():
        try:
            run.folder.require_model(fingerprint(dense.folder))
            training, heldout = run.tokenise()
            initial = run.calibrate(training)
            state = run.align(training, initial)
            layout = run.extract(state)
            record = run.export(layout, heldout)
            results = run.evaluate(heldout, record, state.step)
        except BaseException:
            run.folder.discard_if_unstarted()
            raise
        return Conversion(
            folder=run.folder.path,
            export=run.folder.stage("export"),
            report=run.report(),
            results=results,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """One conversion under way: each method is a stage, skipped where its result is on disk."""

    config: RunConfig
    dense: DenseModel
    granularity: Granularity
    router_dtype: torch.dtype
    """Dtype of the checkpoint to be written."""
    folder: RunFolder
    narrator: Narrator

    def tokenise(self) -> tuple[TokenBlocks, TokenBlocks]:
        """Training blocks, and blocks to measure on that are never trained on."""
        config = self.config
        seq_len = min(config.data.seq_len, self.dense.widths.context)
        files = [self.folder.stage("data") / f"{n}.safetensors" for n in ("training", "heldout")]
        if self.folder.is_finished("data"):
            return TokenBlocks.load(files[0]), TokenBlocks.load(files[1])
        if seq_len < config.data.seq_len:
            self.narrator.say(f"seq_len lowered to {seq_len}: the model has no longer context")
        step_tokens = config.align.steps * config.align.batch_size * seq_len
        wanted = max(step_tokens, config.calibrate.calibration_tokens)
        with self.folder.finishing("data"), self.narrator.bar("tokenise") as update:
            if config.eval_text:
                window = min(2048, self.dense.widths.context)
                remedy = "Give more eval_text and eval_tokens, or no eval_text."
                heldout = self._packed(config.eval_text, window, config.eval_tokens, update, remedy)
                training = self._packed(config.data.data, seq_len, wanted, update)
            else:
                text = self._packed(config.data.data, seq_len, wanted + config.eval_tokens, update)
                training, heldout = text.without_tail(config.eval_tokens)
            training.save(files[0])
            heldout.save(files[1])
        return training, heldout

    def calibrate(self, training: TokenBlocks) -> AlignState:
        """Initial affinities and routers."""
        return self._state("calibrate", lambda folder: self._calibrated(training))

    def align(self, training: TokenBlocks, initial: AlignState) -> AlignState:
        """Learned affinities and routers."""
        return self._state("align", lambda folder: self._aligned(training, initial, folder))

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
        return ExpertLayout.load(file)

    def export(self, layout: ExpertLayout, heldout: TokenBlocks) -> ExportRecord:
        """The checkpoint, verified."""
        if not self.folder.is_finished("export"):
            self.narrator.say("export and verify")
            self.folder.clear("export")
            with self.folder.finishing("export") as folder:
                export(self.dense, layout, folder, self.config.export, heldout.tokens_BT)
        return ExportRecord.load(self.folder.stage("export"))

    def evaluate(self, heldout: TokenBlocks, record: ExportRecord, steps: int) -> dict[str, Any]:
        """Perplexity of the dense model and of the exported checkpoint; also into its card."""
        file = self.folder.stage("evaluate") / "results.json"
        if not self.folder.is_finished("evaluate"):
            text = self.config.eval_text or ("blocks of the data kept out of training",)
            exported = self.folder.stage("export")
            with self.folder.finishing("evaluate"), self.narrator.bar("evaluate") as update:
                results = evaluate_pair(self.dense, exported, heldout, text, update)
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
                write_json(file, results)
        return read_json(file)

    def report(self) -> Path:
        """What was lost and gained; read from result files alone, so made anew each time."""
        with self.folder.finishing("report") as folder:
            return report(self.folder.path, folder)

    def _packed(
        self,
        sources: tuple[str, ...],
        seq_len: int,
        tokens: int,
        update: Callable[..., None],
        remedy: str = "Give more text, or lower seq_len.",
    ) -> TokenBlocks:
        source = replace(self.config.data, data=sources)
        return pack_blocks(
            documents(source),
            self.dense.tokenizer,
            seq_len,
            max_tokens=tokens,
            on_progress=lambda done: update(min(done, tokens), tokens),
            name=", ".join(sources),
            remedy=remedy,
        )

    def _state(self, stage: str, make: Callable[[Path], AlignState]) -> AlignState:
        """State of a stage: from disk where the stage is finished, else made and saved."""
        file = self.folder.stage(stage) / "state.safetensors"
        if not self.folder.is_finished(stage):
            with self.folder.finishing(stage) as folder:
                make(folder).save(file)
        return AlignState.load(file, self.dense.device)

    def _calibrated(self, training: TokenBlocks) -> AlignState:
        config = self.config
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
                on_step=on_step,
            )


def _require_sources(config: RunConfig) -> None:
    """Refuse texts that are not there, which is known before anything is loaded."""
    documents(config.data)
    if config.eval_text:
        documents(replace(config.data, data=config.eval_text))


def verification_figures(record: VerificationRecord) -> dict[str, Any]:
    """The export's verification in a few figures: the worst layer, and the whole model."""
    return {
        "tokens": record.tokens,
        "dtype": record.dtype,
        "largest_block_error": max(layer.block_error for layer in record.layers),
        "largest_misrouted_share": max(layer.misrouted for layer in record.layers),
        "logits_error": record.logits_error,
        "top1_agreement": record.top1_agreement,
        "all_experts_logits_error": record.dense_error,
    }


def card_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the model card's results table."""
    return [
        {
            "model": name,
            "perplexity": f"{result['perplexity']:.3f}",
            "unit": result["unit"],
            "window": result["window"],
            "text": ", ".join(Path(source).name for source in result["text"]),
        }
        for name, result in results.items()
    ]
