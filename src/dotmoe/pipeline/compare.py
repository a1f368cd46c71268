"""Compare conversions of one model by several methods, on the same text.

All have the same budget, data and seeds. Each run has its own run folder: an interrupted command
resumes, and a command with more runs than before makes only the new ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dotmoe.common.device import resolved_device
from dotmoe.common.distributed import require_one_process
from dotmoe.common.errors import UserError, one_line
from dotmoe.common.files import alone_in, write_json, write_text
from dotmoe.common.numbers import ceil_div
from dotmoe.common.progress import Progress
from dotmoe.common.tables import to_markdown, without_html
from dotmoe.export.parameters import active_at
from dotmoe.export.write import export_dtype
from dotmoe.method.granularity import Granularity, from_record
from dotmoe.method.repair import repair_tokens
from dotmoe.models.chat import has_chats
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.identity import FINGERPRINT
from dotmoe.models.load import describe_dense
from dotmoe.pipeline.convert import convert, exportable_splits
from dotmoe.pipeline.finetune import finetune
from dotmoe.pipeline.points import Point, points_of
from dotmoe.pipeline.prune import budget_of, prune
from dotmoe.pipeline.rows import Measured, Row, on_answers, table
from dotmoe.rivals.pruning import require_prunable
from dotmoe.run.config import CompareConfig, PruneRunConfig, RunConfig, finetune_recipe
from dotmoe.run.defaults import with_size, with_sources
from dotmoe.run.folder import OtherRunError, RunFolder
from dotmoe.run.provenance import provenance
from dotmoe.text.questions import asks_by_name
from dotmoe.text.tokenise import TokenisedText

_OWN = "own, not exportable"
_STAGES = ("calibrate", "align", "extract")
"""Stages whose time a frozen row has taken."""

_FAILURES = (UserError, MemoryError, RuntimeError, ArithmeticError)
"""What ends one run of a comparison and not the others: no memory (on a GPU a `RuntimeError`), or
a computation that fails, too. An interrupt or a full disk ends the command."""


def compare(config: CompareConfig, progress: Progress) -> dict[str, Any]:
    """Make every run that is not finished yet, and write `compare.json` and `compare.md`.

    Raises a `UserError` as `convert` does; or if there is no text to measure on, or an option does
    not support heads. Runs that fail are listed in `left_out`.
    """
    if config.finetune_steps and config.experts.targets != "ffn":
        raise UserError(
            f"finetune_steps is {config.finetune_steps}, which works with experts of neurons only, "
            f"but targets is {config.experts.targets}. Leave one of the two out."
        )
    dense = describe_dense(config.model)
    config = with_one_size(with_sources(config, is_chat=has_chats(dense.tokenizer)), dense)
    seq_len = min(config.data.seq_len, dense.widths.context)
    read = _in_blocks(config.calibration_tokens(dense.widths.model), seq_len)
    if config.repair:
        splits = exportable_splits(config, dense)
        read += _in_blocks(repair_tokens(config.repairing, splits, dense.config), seq_len)
    if asks_by_name(config.data) or has_chats(dense.tokenizer):
        # The same chats for all, whatever each of them reads.
        tokens = config.answers.answer_tokens or read
        config = replace(config, answers=replace(config.answers, answer_tokens=tokens))
    with alone_in(Path(config.out)):
        summary = _measure(config, points_of(config, read), dense, progress)
        summary["other_text"] = list(config.other_text)
        path = Path(config.out) / config.command
        protocol = without_html(f"{', '.join(summary['text'])}: {summary['protocol']}\n")
        write_json(path.with_suffix(".json"), summary)
        write_text(path.with_suffix(".md"), f"{to_markdown(table(summary))}\n\n{protocol}")
    return summary


def with_one_size(config: CompareConfig, dense: DenseModel) -> CompareConfig:
    """The config with the size of experts that every method has.

    A method without a shared expert would take another by default, and so run fewer neurons.
    """
    dtype = export_dtype(dense, config.export)
    experts = with_size(config.experts, dense, config.export.format, dtype)
    return replace(config, experts=experts)


def _suitable_points(
    config: CompareConfig, points: list[Point], dense: DenseModel, progress: Progress
) -> Iterator[Point]:
    """Yield the runs that fit the model; others are refused, or left out if methods is `all`."""
    for point in points:
        try:
            if isinstance(point.config, PruneRunConfig):
                device = resolved_device(point.config.load.device)
                require_prunable(point.config.method, dense, device)
            else:
                exportable_splits(point.config, dense)
        except UserError as error:
            if "all" not in config.methods:
                raise
            progress.log(f"{point.name} is left out: {error}")
        else:
            yield point


@contextmanager
def _failure_is_listed(
    name: str, *, last: str, rows: list[Row], left_out: dict[str, str], progress: Progress
) -> Iterator[None]:
    """Within this context, a failure of the run is listed and said, and does not end the others.

    It does end them if all runs to the `last` fail, or the first ones for the same reason. It also
    ends them if a folder has a run with other options: the summary of the runs that are there then
    stays.
    """
    progress.log(f"{name}:")
    try:
        yield
    except OtherRunError:
        raise
    except _FAILURES as error:
        why = str(error) if isinstance(error, UserError) else one_line(repr(error))
        none_succeeded = not rows
        is_known = why in left_out.values()
        left_out[name] = why
        progress.log(f"{name} failed: {why}")
        if none_succeeded and (is_known or name == last):
            raise


def _measure(
    config: CompareConfig, points: list[Point], model: DenseModel, progress: Progress
) -> dict[str, Any]:
    """Make every run that is not finished yet; returns the record of a comparison.

    A run that fails is listed in `left_out` with the reason, and the others are made. Raises the
    error if all fail, or if the first ones fail for the same reason.
    """
    require_one_process(f"dotmoe {config.command}")
    dense_rows = list[Row]()  # one; `rows` are those of the runs
    rows = list[Row]()
    left_out = dict[str, str]()
    budget = budget_of(config, model)
    dense = dict[str, Any]()
    runs = list(_suitable_points(config, points, model, progress))
    if not runs:
        raise UserError("no method fits the model, as said above. Name others with --methods.")
    failure_is_listed = partial(
        _failure_is_listed, last=runs[-1].name, rows=rows, left_out=left_out, progress=progress
    )
    for point in runs:
        with failure_is_listed(point.name):
            results = _made(point, progress)
            # A run whose context was lowered has measured the dense model in shorter windows.
            if not dense or results["dense"]["window"] > dense["window"]:
                dense = results["dense"]
                dense_rows = [_dense_row(results["parameters"]["dense"], dense)]
            for made in _rows(point, results, model):
                row = replace(made, over_budget=_parameters(made) / budget - 1)
                rows.append(row)
                if _is_finetuned(config, point.config, row):
                    tuned = f"{row.run}-finetuned"
                    with failure_is_listed(tuned):
                        rows.append(_finetune(config, row, tuned, progress))
    return {
        "origin": "measured",
        "model": config.model,
        FINGERPRINT: dense.get(FINGERPRINT),  # runs of other versions lack it
        "rows": [row.to_record() for row in [*dense_rows, *rows]],
        "left_out": left_out,
        **{name: dense[name] for name in ("text", "window", "protocol")},
        "provenance": provenance(config.seed, config.load.device),
    }


def _made(point: Point, progress: Progress) -> dict[str, Any]:
    """Results of a run, which is made unless it is already finished."""
    if isinstance(point.config, PruneRunConfig):
        return prune(point.config, progress)
    return convert(point.config, progress).results


def _dense_row(parameters: int, result: dict[str, Any]) -> Row:
    """The row of the dense model, with which all others are compared."""
    return Row(
        run="dense",
        value="dense",
        active_fraction=1.0,
        shared_fraction=0.0,
        parameters=parameters,
        stored=parameters,
        measured=Measured.of(result, result),
    )


def _parameters(row: Row) -> int:
    """Parameters of a row that work on a token, which all made by a run have."""
    assert row.parameters is not None
    return row.parameters


def _trained(config: RunConfig) -> str | None:
    """What a run trains, None if nothing."""
    if isinstance(config, PruneRunConfig):
        return "masks" if config.align.steps else None
    if config.method != "dot_moe":
        return "router" if config.baseline.router_steps else None
    learned = "router and experts" if config.align.learn_assignment else "router"
    return learned if config.align.steps else None


def _rows(point: Point, results: dict[str, Any], model: DenseModel) -> Iterator[Row]:
    """Yield the rows of a run: frozen, repaired, and with a router that no export can hold."""
    config, dense = point.config, results["dense"]
    if isinstance(config, PruneRunConfig):
        yield _pruned_row(point, config, results)
        return
    frozen = _frozen_row(point, config, results, model)
    answered = on_answers(results.get("own_answers", {}).get("moe", {}))
    if config.repair:
        yield frozen
        yield replace(_repaired_row(frozen, config, results), **answered)
    else:
        yield replace(frozen, **answered)
    exact = results.get("moe_own_router")
    if exact is not None:
        own = replace(frozen, router=_OWN, measured=Measured.of(exact, dense))
        split = from_record(results["granularity"])[0]
        yield _as_active(exact["active"], own, split, results["parameters"]["dense"])


def _frozen_row(point: Point, config: RunConfig, results: dict[str, Any], model: DenseModel) -> Row:
    """The row of a conversion before its repair."""
    split = from_record(results["granularity"])[0]
    return Row(
        run=point.name,
        value=point.method,
        router=_router(config, results),
        trained=_trained(config) or "nothing",
        weights="frozen",
        seed=config.seed,
        active_fraction=split.active_fraction,
        shared_fraction=split.shared_size / split.units,
        parameters=results["parameters"]["active"],
        stored=results["parameters"]["stored"],
        steps=results["steps"],
        text_tokens=text_tokens(config, results["steps"], model),
        seconds=RunFolder(Path(config.out)).seconds(*_STAGES),
        measured=Measured.of(results["frozen" if config.repair else "moe"], results["dense"]),
        details=results["granularity"],
    )


def _repaired_row(frozen: Row, config: RunConfig, results: dict[str, Any]) -> Row:
    """The row of a conversion after its repair."""
    return replace(
        frozen,
        weights="repaired",
        text_tokens=(frozen.text_tokens or 0) + results["repair"]["tokens"],
        seconds=RunFolder(Path(config.out)).seconds(*_STAGES, "repair"),
        measured=Measured.of(results["moe"], results["dense"]),
    )


def _router(config: RunConfig, results: dict[str, Any]) -> str:
    """Where the router of a conversion comes from."""
    if "moe_own_router" in results:
        return "own, linear"
    if config.method != "dot_moe":
        return config.baseline.split_router
    return "ridge" if config.calibrate.start == "data" else "random"


def _pruned_row(point: Point, config: PruneRunConfig, results: dict[str, Any]) -> Row:
    """The row of a pruned model."""
    found = results["pruning"]
    return Row(
        run=point.name,
        value=point.method,
        trained=_trained(config),
        parameters=found["parameters"],
        stored=found["stored"],
        steps=config.align.steps,
        text_tokens=found["calibration_tokens"],
        seconds=found["seconds"],
        measured=Measured.of(results["pruned"], results["dense"]),
        **on_answers(results.get("own_answers", {}).get("pruned", {})),
        details={name: found[name] for name in ("calibration_tokens", "plan")},
    )


def _in_blocks(tokens: int, seq_len: int) -> int:
    """Tokens of the whole blocks that so many are read in."""
    return ceil_div(tokens, seq_len) * seq_len


def text_tokens(config: RunConfig, steps: int, model: DenseModel) -> int:
    """Number of tokens that a conversion's calibration and `steps` of training have read."""
    text = TokenisedText.load(RunFolder(Path(config.out)).path_of("data")).training
    calibrated = text.num_drawn(config.calibration_tokens(model.widths.model))
    return calibrated + steps * config.align.batch_size * text.seq_len


def _is_finetuned(config: CompareConfig, run: RunConfig | PruneRunConfig, row: Row) -> bool:
    """Whether a comparison finetunes a row; only one whose weights and router are an export's."""
    exported = "repaired" if getattr(run, "repair", False) else "frozen"
    return config.finetune_steps > 0 and row.weights == exported and row.router != _OWN


def _finetune(config: CompareConfig, row: Row, name: str, progress: Progress) -> Row:
    """The row of an export after finetuning, which runs unless it is already finished."""
    settings = finetune_recipe(config.finetune_recipe)
    out = Path(config.out)
    run = replace(
        settings,
        run=str(out / row.run),
        out=str(out / name),
        data=replace(settings.data, seq_len=config.data.seq_len),
        eval_tokens=config.eval_tokens,
        answers=replace(config.answers, answer_tokens=None),
        finetune=replace(settings.finetune, steps=config.finetune_steps),
        export=config.export,
        training=config.training,
        load=config.load,
        seed=row.seed or 0,
    )
    results = finetune(run, progress).results
    return replace(
        row,
        run=name,
        weights="finetuned",
        steps=(row.steps or 0) + results["steps"],
        text_tokens=(row.text_tokens or 0) + results["tokens"],
        finetune_tokens=results["tokens"],
        seconds=(row.seconds or 0.0) + (RunFolder(out / name).seconds("finetune") or 0.0),
        measured=Measured.of(results["moe"], results["dense"]),
        **on_answers(results.get("own_answers", {}).get("moe", {})),
    )


def _as_active(active: dict[str, Any], row: Row, split: Granularity, dense: int) -> Row:
    """The row with the active share and parameters that vary between tokens, if they do."""
    if active["std"] == 0:
        return row
    share = active["mean"]
    parameters = active_at(share, split, dense, _parameters(row))
    return replace(row, active_fraction=share, active_std=active["std"], parameters=parameters)
