"""Recovery training of a finished conversion: tokenise -> finetune -> export -> evaluate."""

from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dotmoe.config import as_values
from dotmoe.data import TokenBlocks, write_decontaminated
from dotmoe.device import resolved_device
from dotmoe.distributed import from_first, is_first, joined, mesh, on_every_rank
from dotmoe.evaluate import perplexities
from dotmoe.export import ExportRecord, export, require_intact, write_model_card
from dotmoe.export.architecture import granularity_of
from dotmoe.finetune import LAYOUT, MODEL, Start, finetune, steps_to_take, wants_own_teacher
from dotmoe.layout import ExpertLayout
from dotmoe.narration import Narrator
from dotmoe.recovery.opened import OpenedRecovery
from dotmoe.recovery_config import RecoveryConfig
from dotmoe.report import report
from dotmoe.run_folder import export_folder, provenance, read_json, write_json
from dotmoe.run_results import card_rows, verification_figures
from dotmoe.tokenise import (
    RECORD_FILE,
    block_files,
    heldout_text,
    load_blocks,
    measured_on,
    samples_itself,
    training_text,
)
from dotmoe.training.loop import Metrics, checkpoints_in


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """What `recover` leaves behind."""

    folder: Path
    """The run folder."""
    export: Path
    """The checkpoint, loadable by stock Transformers."""
    report: Path
    """Dense, converted and finetuned side by side, as one HTML page."""
    results: dict[str, Any]
    """Contents of `6_evaluate/results.json`; empty on ranks other than the first."""


def recover(config: RecoveryConfig, narrator: Narrator | None = None) -> Recovery:
    """Train the model of a finished run, and export and measure what came out.

    Every stage that `config.out` does not hold finished yet is run. Under torchrun all ranks call
    it, with a run folder that all of them see; the first goes on alone after the training.

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
            run.finetune(training)
        folder, exported = run.folder.path, run.folder.stage("export")
        if not first:
            page = run.folder.stage("report")
            return Recovery(folder=folder, export=exported, report=page, results={})
        results = run.measured(heldout)
        return Recovery(folder=folder, export=exported, report=report(folder), results=results)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run(OpenedRecovery):
    """One recovery under way: each method is a stage, skipped where its result is on disk."""

    def tokenise(self) -> tuple[TokenBlocks, TokenBlocks]:
        """Training blocks without what is in the held-out ones, which are the run's by default."""
        from_first(self._tokenise)
        return on_every_rank(lambda: load_blocks(self.folder.stage("data")))

    def finetune(self, training: TokenBlocks) -> None:
        """Trained weights as a dense checkpoint, and the layout with trained routers."""
        if not from_first(lambda: self.folder.is_finished("finetune")):
            with self.folder.finishing("finetune") as folder:
                self._finetuned(training, folder)
        folder = self.folder.stage("finetune")
        if is_first():
            self.folder.intact("finetune", *([LAYOUT] if self.folder.is_finished("export") else []))
            checkpoints_in(folder).remove()

    def measured(self, heldout: TokenBlocks) -> dict[str, Any]:
        """Export, then perplexity of dense, converted and finetuned model; also into the card."""
        layout = ExpertLayout.load(self.folder.stage("finetune") / LAYOUT)
        record = self._exported(layout, heldout)
        file = self.folder.stage("evaluate") / "results.json"
        if not self.folder.is_finished("evaluate"):
            with self.folder.finishing("evaluate"):
                write_json(file, self._results(layout, record, heldout))
        self.folder.intact("evaluate")
        return read_json(file)

    def _tokenise(self) -> None:
        if not self.folder.is_finished("data"):
            with self.folder.finishing("data") as folder:
                write_json(folder / RECORD_FILE, self._tokenised(folder))
        self.folder.intact("data")

    def _tokenised(self, folder: Path) -> dict[str, Any]:
        config, data = self.config, self.converted.data
        training_file, heldout_file = block_files(folder)
        if config.eval_text:
            heldout = heldout_text(self.converted, self.dense, heldout_file, self.narrator).blocks
        else:
            heldout = self.start.heldout
            heldout.save(heldout_file)
        seq_len = min(data.seq_len, self.dense.widths.context)
        source = replace(data, seq_len=seq_len)
        tokens = config.finetune.steps * config.finetune.batch_size * seq_len
        tokens += heldout.num_tokens  # of which the same source may hold some, to be left out
        dense = self.loaded() if samples_itself(data) else self.dense
        whole = folder / "whole.safetensors"
        sample = self.converted.sample
        text = training_text(source, sample, dense, whole, tokens, self.narrator)
        left_out = write_decontaminated(text.blocks, heldout, training_file)
        if left_out:
            self.narrator.say(
                f"{left_out} of {text.blocks.num_blocks} blocks of training text left out: they "
                "are part of the held-out text"
            )
        whole.unlink()
        return {"training": text.record, "left_out_blocks": left_out}

    def _finetuned(self, training: TokenBlocks, folder: Path) -> None:
        config = self.config
        device = resolved_device(config.load.device)
        ranks = mesh(device)
        if ranks is not None and not self.is_sharded(device):
            ranks = None
        dense = self.loaded() if ranks is None else self.unloaded(device)
        teacher = None
        if wants_own_teacher(config.finetune):
            teacher = self.loaded(sharding="replicate" if ranks is None else "shard")
        steps = steps_to_take(config.finetune, training.num_blocks)
        if steps < config.finetune.steps:
            self.narrator.say(
                f"steps lowered from {config.finetune.steps} to {steps}: the data would otherwise "
                f"be seen more than {config.finetune.max_epochs:g} times (max_epochs). With little "
                "data or a small model, --recipe small takes more and smaller steps"
            )
        with self.narrator.bar(f"finetune ({config.finetune.train})") as update:

            def on_step(step: int, metrics: Metrics) -> None:
                update(step, steps, f"ce {metrics['ce']:.3f}")

            finetune(
                Start(dense=dense, layout=self.start.layout, teacher=teacher),
                training,
                config.finetune,
                folder=folder,
                seed=config.seed,
                router_dtype=self.router_dtype,
                sharded_over=ranks,
                training=config.training,
                on_step=on_step,
            )

    def _exported(self, layout: ExpertLayout, heldout: TokenBlocks) -> ExportRecord:
        """The checkpoint, verified."""
        if self.folder.is_finished("export"):
            require_intact(
                self.folder.stage("export"), read_weights=not self.folder.is_finished("evaluate")
            )
        else:
            self.narrator.say("export and verify")
            self.folder.clear("export")
            model = str(self.folder.stage("finetune") / MODEL)
            trained = self.for_one_rank(model)
            with self.folder.finishing("export") as folder:
                export(trained, layout, folder, self.config.export, heldout.tokens_BT)
        return ExportRecord.load(self.folder.stage("export"))

    def _results(
        self, layout: ExpertLayout, record: ExportRecord, heldout: TokenBlocks
    ) -> dict[str, Any]:
        exported = self.folder.stage("export")
        folders = {"moe": exported}
        if self.source.is_finished("export"):
            folders = {"converted": export_folder(self.source.path), **folders}
        text = measured_on(self.converted)
        with self.narrator.bar("evaluate") as update:
            dense = self.for_one_rank(self.start.model)
            results = perplexities(dense, folders, heldout, text, update)
        write_model_card(exported, record, card_rows(results))
        training, _ = load_blocks(self.folder.stage("data"))
        steps = steps_to_take(self.config.finetune, training.num_blocks)
        return results | {
            "origin": "measured",
            "granularity": asdict(granularity_of(layout)),
            "steps": steps,
            "tokens": steps * self.config.finetune.batch_size * training.seq_len,
            "parameters": record.parameters,
            "verification": verification_figures(record.verification),
            "config": as_values(self.config),
            "provenance": provenance(self.config.seed),
        }
