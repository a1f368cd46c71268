"""`finetune`: the model of a finished run is trained, exported and measured.

answers -> tokenise -> finetune -> export -> evaluate -> report
"""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from dotmoe.common.device import resolved_device
from dotmoe.common.distributed import num_ranks, process_group, raise_on_all_ranks
from dotmoe.common.errors import UserError, require_package
from dotmoe.common.files import read_json
from dotmoe.common.numbers import ceil_div
from dotmoe.common.options import checked
from dotmoe.common.progress import Progress
from dotmoe.export.record import require_checksums, require_written_k
from dotmoe.export.write import require_exportable
from dotmoe.method.finetuning import computed_in
from dotmoe.method.finetuning import finetune as train
from dotmoe.method.granularity import targets_of
from dotmoe.method.layout import (
    Layouts,
    load_layouts,
    splits_in,
)
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.load import left_on_disk
from dotmoe.pipeline.conversion import Conversion
from dotmoe.pipeline.device import fitting_the_device
from dotmoe.pipeline.stages import Run
from dotmoe.run.config import FinetuneRunConfig, RunConfig
from dotmoe.run.finished import FinishedRun
from dotmoe.run.folder import RESULTS
from dotmoe.text.sources import fingerprints_of, is_text
from dotmoe.text.tokenise import require_sources


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
            run = Run(config, progress, converted)
            if config != given:
                how, ranks = config.finetune, num_ranks()
                run.progress.log(f"batch_size {ranks} and {how.steps} steps, one row for each rank")
            if run.start(work, source):
                return run.conversion()
            dense = raise_on_all_ranks(source.origin)
            splits = splits_in(source.layouts)
            raise_on_all_ranks(lambda: require_exportable(dense, splits, config.export))
            how = config.finetune
            kept = source.answers.fitted if config.reuse_answers else ()
            run.answer(dense, how.steps * how.batch_size * config.data.seq_len, kept)
            run.tokenise(dense, 0, text_of_run=source.text)
            layouts, blocks = _train(run, dense, source), run.text.training
            steps = config.finetune.schedule(blocks.num_blocks).steps
            tokens = steps * config.finetune.batch_size * blocks.seq_len
            metrics = {"steps": steps, "tokens": tokens}
        if not run.is_rank_zero:
            return run.conversion()
        is_measured_alike = not config.eval_text and config.load == source.config.load
        if source.has_own_weights and is_measured_alike and source.folder.has("evaluate"):
            measured = read_json(source.folder.verified("evaluate") / RESULTS)
            metrics["frozen"] = measured["frozen"]  # before the repair
        before = "repaired" if source.has_own_weights else "converted"
        earlier = {before: source.folder.path_of("export")} if source.folder.has("export") else {}
        dense = left_on_disk(dense, config.load)
        run.export(dense, run.trained("finetune", dense), layouts)
        run.evaluate(dense, layouts, lambda: metrics, earlier)
        return run.conversion()


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
    if config.reuse_answers and not source.answers.fitted:
        raise UserError(
            f"reuse_answers is True, but {config.run} was fitted to no answers of its model. Leave "
            "it out."
        )
    if source.folder.has("export"):  # it is measured beside the result
        require_written_k(source.folder.path_of("export"))
        require_checksums(source.folder.path_of("export"), read_weights=False)
    if config.data.data:
        return source, replace(source.config, data=config.data)
    _require_same_text(source)
    data = replace(source.config.data, seq_len=config.data.seq_len)
    return source, replace(source.config, data=data)


def _require_same_text(source: FinishedRun) -> None:
    """Refuse files of the run's text that have other contents than those that the run read."""
    config: Any = source.config
    texts = (*config.eval_text, *config.other_text)
    found = fingerprints_of((*config.data.data, *texts))
    recorded = source.folder.manifest["inputs"]
    try:
        require_sources(config.data, texts)
        if any(is_text(name) and name not in found for name in recorded):
            raise UserError("a part of it is gone. Put it there again.")
    except UserError as error:
        raise UserError(
            f"the text of {source.folder.path} cannot be read again from {Path.cwd()}: {error} Or "
            "name the text to finetune on: --data."
        ) from error
    if any(sha != recorded.get(name, sha) for name, sha in found.items()):
        raise UserError(
            f"the text of {source.folder.path} ({', '.join(config.data.data)}) has changed since "
            "the run read it. Restore it, or name the text to finetune on: --data."
        )


def _for_each_rank(config: FinetuneRunConfig) -> FinetuneRunConfig:
    """The config, with batches of a row for each rank and as many rows in all if it has smaller."""
    how, ranks = config.finetune, num_ranks()
    if how.batch_size >= ranks:
        return config
    steps = ceil_div(how.steps * how.batch_size, ranks)
    return replace(config, finetune=replace(how, batch_size=ranks, steps=steps))


def _train(run: Run, dense: DenseModel, source: FinishedRun) -> Layouts:
    """Run the finetune stage on a finished run; returns its layout with the trained routers."""
    config = run.config
    start, origin = dense, None
    (layout,) = source.layouts  # of FFNs: experts made of heads are refused
    if source.has_own_weights:
        start, origin = raise_on_all_ranks(source.described), dense

    def make(folder: Path) -> Layouts:
        dtype, sharded = computed_in(start, config.finetune, config.load)
        splits = (layout.granularity,)
        how = fitting_the_device(run, start, splits, config.finetune, dtype=dtype, sharded=sharded)
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

    return run.run_stage("finetune", load_layouts, make)
