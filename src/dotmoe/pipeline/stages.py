"""A run in progress, with the stages that the commands share."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dotmoe.common.distributed import (
    broadcast_from_rank_zero,
    is_rank_zero,
    raise_on_all_ranks,
    require_equal_shares,
)
from dotmoe.common.errors import UserError
from dotmoe.common.files import Values, read_json, write_json
from dotmoe.common.options import values_of
from dotmoe.common.progress import Progress
from dotmoe.common.tables import Table
from dotmoe.export.record import (
    ExportRecord,
    require_checksums,
    require_written_k,
    write_model_card,
)
from dotmoe.export.write import export
from dotmoe.measure.evaluate import perplexity
from dotmoe.measure.evaluate.answers_at_k import curve_in_short, curve_on_own_answers
from dotmoe.measure.evaluate.models import context_of
from dotmoe.measure.evaluate.own_answers import (
    DenseStates,
    on_own_answers,
    own_answers_table,
    states_on,
)
from dotmoe.measure.report.page import html_report
from dotmoe.method.config import ObjectiveConfig
from dotmoe.method.granularity import to_record
from dotmoe.method.layout import (
    Layouts,
    splits_in,
)
from dotmoe.method.repair import REPAIR_METRICS, repair
from dotmoe.models.chat import has_chats
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.identity import FINGERPRINT, fingerprint
from dotmoe.models.load import describe_dense, describe_trained, left_on_disk, load_whole
from dotmoe.models.scoring import loss_of
from dotmoe.pipeline.conversion import Conversion
from dotmoe.run.config import PruneRunConfig, RunConfig
from dotmoe.run.finished import FinishedRun
from dotmoe.run.folder import RESULTS, RunFolder
from dotmoe.run.provenance import provenance
from dotmoe.text.answers import Answer, OwnAnswers
from dotmoe.text.answers_of_run import own_answers
from dotmoe.text.blocks import TokenBlocks
from dotmoe.text.config import SELF, AnswersConfig
from dotmoe.text.questions import asks_by_name
from dotmoe.text.sources import fingerprints_of
from dotmoe.text.tokenise import (
    MOST_OWN_TOKENS,
    NO_ANSWERS,
    OTHER,
    TokenisedText,
    own_tokens_for,
    require_sources,
    tokenise,
    write_windows,
)
from dotmoe.training.folder import OnStep

_ROUND_OF_FINETUNING = 500
"""Rounds of own answers from here on are for a finetuning, which reads other ones."""
CHANCE_TOKENS = 256
CHANCE_SHARE = 0.9
"""Share of the loss of equal chances, log(vocabulary), from which a model has learned nothing: of a
trained one the loss on a text in another language is about half of it."""
logger = logging.getLogger(__name__)


class Run:
    """A run in progress, with the stages that several commands share."""

    own: OwnAnswers = NO_ANSWERS
    """What the dense model wrote in this run, set by `answer`."""
    text: TokenisedText
    """Training and held-out text, set by `tokenise`."""
    texts: dict[tuple[str, ...], TokenBlocks]
    """Texts to measure perplexity on, by name: the held-out text, and `other_text` if given."""

    def __init__(
        self, config: Any, progress: Progress | None, converted: RunConfig | None = None
    ) -> None:
        self.config = config
        self.converted: RunConfig = converted or config
        """Config of the conversion, which names the text sources."""
        self.objective: ObjectiveConfig = config.finetune if converted else config.align
        self.is_finetuning = converted is not None
        self.is_rank_zero = is_rank_zero()
        self.progress = progress if progress and self.is_rank_zero else Progress(quiet=True)
        self.folder = RunFolder(Path(config.out), self.progress.log)
        self.run_stage = self.folder.run_stage

    def start(self, work: ExitStack, source: FinishedRun | None = None) -> bool:
        """Lock the run folder while `work` is open; returns whether the run is already finished.

        `source` is the run to finetune, None if the run begins with a dense model.
        """
        config, folder = self.config, self.folder
        last = "prune" if isinstance(config, PruneRunConfig) else "export"

        def begin() -> bool:
            work.enter_context(folder.at_work(config))
            is_done = folder.has(last, "evaluate")
            texts = (*config.eval_text, *self.converted.other_text)
            if not is_done and not folder.has("data"):
                require_sources(self.converted.data, texts)
            if source:
                begun, inputs = source.folder.manifest, source.fingerprints
                model, revision = begun["model"], begun.get("revision")
            else:
                dense = describe_dense(folder.model_to_read if folder.exists else config.model)
                self._require_asked(dense)
                model, revision = config.model, dense.revision
                inputs = {"model": fingerprint(dense.folder)}
            inputs |= fingerprints_of((*self.converted.data.data, *texts))
            if is_done:
                folder.require_inputs(inputs)
            else:
                folder.begin(config, model, revision, inputs)
            return is_done

        if self.objective.steps:
            raise_on_all_ranks(lambda: require_equal_shares(self.objective.batch_size))
        return broadcast_from_rank_zero(begin)

    def json_stage(self, name: str, file: str, make: Callable[[Path], Values]) -> Values:
        """The JSON object that a stage makes, kept in a file of its folder."""
        return self.run_stage(
            name,
            lambda folder: read_json(folder / file),
            make,
            save=lambda values, folder: write_json(folder / file, values),
        )

    def answer(self, dense: DenseModel, tokens: int, kept: Sequence[Answer] = ()) -> None:
        """Run the stage in which the dense model writes: `tokens` to fit to, and held-out answers.

        Rank zero alone writes. There is no such stage if a run neither asks nor can be asked.
        Answers `kept` from the run that is finetuned are not written again.
        """
        config, data, how = self.config, self.converted.data, self.config.answers
        if not asks_by_name(data) and not has_chats(dense.tokenizer):
            return
        has_heldout = self.is_finetuning or bool(config.eval_text)
        asked_for = how.answer_tokens or own_tokens_for(
            data, tokens, config.eval_tokens, has_heldout=has_heldout
        )
        if how.answer_tokens is None and asks_by_name(data) and asked_for > MOST_OWN_TOKENS:
            raise UserError(
                f"the model would write {asked_for:,} tokens itself. Name a text to read: --data "
                "FILE; or say how many tokens it writes: --answer-tokens N."
            )

        def write(folder: Path) -> None:
            model = dense
            if dense.weights != "memory":  # in shards; or described alone, as in a finetuning
                model = load_whole(dense, self.config.load)
            own = own_answers(
                model,
                data,
                identity=self.folder.manifest["inputs"]["model"],
                tokens=asked_for,
                heldout=how.heldout_answers,
                seed=data.data_seed,
                first_round=_ROUND_OF_FINETUNING if self.is_finetuning else 0,
                kept=kept,
                is_number_given=how.answer_tokens is not None,
                progress=self.progress,
            )
            own.save(folder)

        def make(folder: Path) -> OwnAnswers:
            broadcast_from_rank_zero(lambda: write(folder))
            return raise_on_all_ranks(lambda: load(folder))

        def load(folder: Path) -> OwnAnswers:
            return OwnAnswers.load(folder, asked_for)

        self.own = self.run_stage("answers", load, make)

    def _require_asked(self, dense: DenseModel) -> None:
        """Refuse options of answers where no answers are written."""
        if asks_by_name(self.converted.data) or has_chats(dense.tokenizer):
            return
        how = self.config.answers
        if how.answer_tokens is not None:
            option, value = "--answer-tokens", how.answer_tokens
        elif how.heldout_answers not in (0, AnswersConfig().heldout_answers):
            option, value = "--heldout-answers", how.heldout_answers
        else:
            return
        raise UserError(
            f"{option} is {value}, but the data do not ask the model, and it has no chat template: "
            f"no answers are written. Add --data {SELF}, or leave {option} out."
        )

    def tokenise(
        self, dense: DenseModel, min_tokens: int, text_of_run: TokenisedText | None = None
    ) -> None:
        """Run the tokenise stage; rank zero alone writes the training and the held-out text."""
        config, data = self.config, self.converted.data

        def write(folder: Path) -> None:
            other = self.converted.other_text
            if text_of_run is not None and text_of_run.other is not None:
                text_of_run.other.save(folder / OTHER)  # both are measured on the same tokens
            elif other:
                path, tokens = folder / OTHER, config.eval_tokens
                write_windows(other, data, dense, path, tokens, self.progress)
            tokenise(
                data,
                dense,
                folder,
                blocks=max(1, self.objective.steps * self.objective.batch_size),
                min_tokens=min_tokens,
                eval_text=config.eval_text,
                eval_tokens=config.eval_tokens,
                progress=self.progress,
                text_of_run=text_of_run,
                own=self.own,
            )

        def make(folder: Path) -> TokenisedText:
            broadcast_from_rank_zero(lambda: write(folder))
            text = raise_on_all_ranks(lambda: TokenisedText.load(folder))
            if dense.weights in ("memory", "shards"):
                self._warn_of_chance(dense, text.training.drawn(CHANCE_TOKENS)[:, :CHANCE_TOKENS])
            return text

        self.text = text = self.run_stage("data", TokenisedText.load, make)
        self.texts = {text.heldout_name: text.heldout}
        if other := self.converted.other_text:
            self.texts[other] = TokenBlocks.load(self.folder.path_of("data") / OTHER)

    def _warn_of_chance(self, dense: DenseModel, tokens_BT: Tensor) -> None:
        """Say, before anything is paid, that a dense model has not learned this text."""
        loss = loss_of(dense.model, tokens_BT)
        chance = math.log(dense.widths.vocabulary)
        if loss > CHANCE_SHARE * chance and self.is_rank_zero:
            logger.warning(
                "%s predicts no better than chance: %.2f nats per token over %d tokens of the "
                "text, where equal chances for %d tokens give %.2f. Its head, its tokenizer or "
                "its weights are not those of a trained model: compare it with the original.",
                dense.source,
                loss,
                tokens_BT[:, 1:].numel(),
                dense.widths.vocabulary,
                chance,
            )

    @contextmanager
    def training_bar(self, title: str) -> Iterator[OnStep]:
        """Within this context, a bar shows training steps, tokens per second and active losses."""
        losses = [name for name in ("kl", "ce") if getattr(self.objective, f"{name}_weight")]
        blocks = self.text.training
        steps = self.objective.schedule(blocks.num_blocks).steps
        with self.progress.bar(title, self.objective.batch_size * blocks.seq_len) as update:
            yield lambda step, metrics: update(
                step, steps, " ".join(f"{name} {metrics[name]:.3f}" for name in losses)
            )

    def repair(self, dense: DenseModel, layouts: Layouts) -> dict[str, Any]:
        """Run the stage that repairs the dense weights under the layouts' masks; its metrics."""

        def make(folder: Path) -> dict[str, Any]:
            with self.progress.bar("repair") as update:
                return repair(
                    dense,
                    layouts,
                    self.text.training,
                    self.config.repairing,
                    seed=self.config.seed,
                    folder=folder,
                    on_progress=update,
                )

        return self.run_stage("repair", lambda folder: read_json(folder / REPAIR_METRICS), make)

    def trained(self, stage: str, dense: DenseModel) -> DenseModel:
        """The dense model with the weights that a stage wrote, left on disk."""
        return left_on_disk(describe_trained(dense, self.folder.path_of(stage)), self.config.load)

    def export(self, dense: DenseModel, weights: DenseModel, layouts: Layouts) -> None:
        """Write and verify the export of `weights`: `dense`, or its repaired or finetuned form."""

        def make(folder: Path) -> None:
            with self.progress.bar("export") as update:
                export(
                    weights,
                    layouts,
                    folder,
                    self.config.export,
                    self.text.heldout.tokens_BT,
                    origin=dense,
                    on_progress=update,
                )

        def load(folder: Path) -> None:
            require_written_k(folder)  # what is measured next belongs to that k
            require_checksums(folder)

        self.run_stage("export", load, make)

    def evaluate(
        self,
        dense: DenseModel,
        layouts: Layouts,
        measure: Callable[[], dict[str, Any]],
        earlier: dict[str, Path] | None = None,
        judge: Callable[[dict[str, Any]], dict[str, Any]] = lambda answered: {},
    ) -> None:
        """Measure perplexity of the dense model, the export, and `earlier` exports by name.

        The results also have what `measure` returns and what the export's record contains. `judge`
        gets the export's closeness on held-out answers. It returns further results, or raises to
        refuse the export; the stage then stays unfinished. All models are measured in the same
        windows, no longer than the shortest of their contexts.
        """
        exported = self.folder.path_of("export")
        exports = {**(earlier or {}), "moe": exported}

        def measured() -> dict[str, Any]:
            record = ExportRecord.load(exported)
            context = min(map(context_of, exports.values()))
            self.texts = perplexity.cut_to_context(self.texts, context)
            results = {"dense": self.dense_perplexity(dense)}
            more = measure()
            dense_states = states_on(dense, self.own)
            dtype = next(dense.model.parameters()).dtype
            device = dense.device
            if dense.weights == "memory":  # an export is loaded next
                dense.model.to("meta")
            results |= self.export_perplexities(exports, dense.tokenizer, dtype, device)
            answered = self.on_own_answers(dense, exports, dense_states)
            judged = judge(answered.get("moe", {}))
            curve = self._at_other_k(exported, dense_states, answered)
            write_model_card(exported, record, *self._card_tables(results, answered, curve))
            return {
                **results,
                "own_answers": answered,
                "own_answers_curve": curve,
                **judged,
                **more,
                "text_notes": list(self.text.notes),
                "granularity": to_record(splits_in(layouts)),
                "parameters": record.parameters,
                "verification": record.verification_in_short(),
            }

        self.write_results(measured)

    def _card_tables(
        self, results: dict[str, Any], answered: dict[str, Any], curve: dict[str, Any]
    ) -> Iterator[Table | str]:
        """What a model card shows: perplexity, held-out answers, and both at other k."""
        text = f"Text: {perplexity.text_names(results['dense'])}."
        missing = [f"{said[0].upper()}{said[1:]}." for said in self.text.notes]
        yield replace(perplexity.perplexity_table(results), note=" ".join([text, *missing]))
        if answered:
            yield own_answers_table({"this model": answered["moe"]})
        if curve:
            yield curve_in_short(curve)

    def on_own_answers(
        self, dense: DenseModel, exports: dict[str, Path], dense_states: dict[str, DenseStates]
    ) -> dict[str, Any]:
        """Closeness of exports on held-out answers, by name; empty if there are none."""
        if not dense_states:  # no bar of nothing
            return {}
        seed = self.converted.data.data_seed
        with self.progress.bar("held-out answers") as update:
            return on_own_answers(dense_states, dense.tokenizer, exports, self.own, seed, update)

    def _at_other_k(
        self, exported: Path, dense_states: dict[str, DenseStates], answered: dict[str, Any]
    ) -> dict[str, Any]:
        """The export on held-out answers at other k; empty if there are none, or k is fixed."""
        if not answered:
            return {}
        with self.progress.bar("held-out answers, other k") as update:
            return curve_on_own_answers(dense_states, exported, self.own, answered["moe"], update)

    def write_results(self, measure: Callable[[], dict[str, Any]]) -> None:
        """Run the evaluate stage: write what `measure` returns, with config and provenance."""

        def make(folder: Path) -> None:
            origin = {"origin": "measured", "config": values_of(self.config)}
            origin["provenance"] = provenance(self.config.seed, self.config.load.device)
            write_json(folder / RESULTS, measure() | origin)

        self.run_stage("evaluate", lambda folder: None, make)

    def results(self) -> dict[str, Any]:
        """The results that the evaluate stage wrote."""
        return read_json(self.folder.verified("evaluate") / RESULTS)

    def dense_perplexity(self, dense: DenseModel) -> Values:
        """Perplexity of the dense model, with its fingerprint."""
        with self.progress.bar("evaluate", tokens=1) as update:
            measured = perplexity.heldout_perplexity(
                dense.model, dense.tokenizer, self.texts, update
            )
        return measured | {FINGERPRINT: fingerprint(dense.folder)}

    def export_perplexities(
        self, exports: dict[str, Path], tokenizer: Any, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Values]:
        """Perplexity of exports by name, each with its fingerprint; one is in memory at a time."""
        results = dict[str, Values]()
        for name, folder in exports.items():
            with self.progress.bar("evaluate the export", tokens=1) as update:
                measured = perplexity.export_perplexity(
                    folder, tokenizer, self.texts, update, dtype=dtype, device=device
                )
            results[name] = measured | {FINGERPRINT: fingerprint(folder)}
        return results

    def perplexity_within(
        self, change: AbstractContextManager[None], name: str, dense: DenseModel
    ) -> dict[str, Any]:
        """Perplexity of a dense model in memory while the context `change` alters it."""
        with self.progress.bar(f"evaluate {name}", tokens=1) as update, change:
            return perplexity.heldout_perplexity(dense.model, dense.tokenizer, self.texts, update)

    def conversion(self) -> Conversion:
        """The result of the run; the report is made anew each time, from result files alone."""
        path, exported = self.folder.path, self.folder.path_of("export")
        page = self.folder.path_of("report") / "report.html"
        results = dict[str, Any]()
        if self.is_rank_zero:
            results = self.results()
            require_checksums(exported, read_weights=False)
            page = html_report(path)
        return Conversion(folder=path, export=exported, report=page, results=results)
