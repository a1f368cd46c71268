"""`--keep`: the smallest active share whose model keeps so much of the dense model's answers.

A share is tried by a small conversion: experts, routers and the refit in closed form from a part of
the text, measured in memory on held-out answers. The run then converts with the smallest share that
keeps enough. Its export is measured too, and counts: if it keeps less, the next larger share is
taken.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from safetensors.torch import load_file

from dotmoe.common.distributed import require_one_process
from dotmoe.common.errors import UserError
from dotmoe.common.files import Values, read_json, remove, write_json
from dotmoe.common.progress import Update
from dotmoe.common.tables import percent
from dotmoe.export.parameters import count_parameters
from dotmoe.export.write import export_dtype, require_exportable
from dotmoe.measure.evaluate.kept import speed_in_words, to_a_tenth
from dotmoe.measure.evaluate.own_answers import (
    DenseStates,
    closeness_on,
    states_on,
    worse_set,
)
from dotmoe.method.calibrate import calibrate
from dotmoe.method.config import RepairConfig
from dotmoe.method.dense_layers import leading_outliers
from dotmoe.method.extract import extract
from dotmoe.method.granularity import Granularity
from dotmoe.method.layout import ExpertLayout
from dotmoe.method.masked import masked_by
from dotmoe.method.repair import repair, repair_tokens
from dotmoe.method.repair.streams import with_weights
from dotmoe.models.chat import has_chats, why_not_asked
from dotmoe.models.checkpoint import CHANGED
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.load import CHANGES
from dotmoe.pipeline.stages import Run
from dotmoe.run.config import RunConfig
from dotmoe.run.defaults import splits_for, with_defaults

TRIED_PART, FEWEST_TRIED_TOKENS = 8, 8_192
"""A trial reads one token of so many that the conversion reads, but at least this number."""
_STEPS = 8
"""Shares are tried in steps of one of so many."""
_CHOSEN, _TRIALS, _MISSED = "share.json", "trials.parts", "missed.parts"


class MissedError(Exception):
    """An export keeps less than asked, and a larger share is left to take."""

    def __init__(self, active_experts: int, kept: float) -> None:
        super().__init__(f"{active_experts} experts keep {kept}")
        self.active_experts, self.kept = active_experts, kept


def require_answers(config: RunConfig, dense: DenseModel) -> None:
    """Refuse to keep a part of answers where none are written, or on several processes."""
    keep = config.experts.keep
    if keep is None:
        return
    require_one_process("--keep")
    if not has_chats(dense.tokenizer):
        raise UserError(
            f"keep is {keep:g}, but the model has no chat template, so it has no answers to "
            "keep. Give --active instead."
        )
    if why := why_not_asked(dense.tokenizer):
        raise UserError(f"keep is {keep:g}, but {why} Or give --active instead.")
    if not config.answers.heldout_answers:
        raise UserError(
            f"keep is {keep:g}, but heldout_answers is 0, so there are no answers to measure on. "
            "Raise heldout_answers, or give --active instead."
        )


def at_chosen_share(run: Run, dense: DenseModel) -> RunConfig:
    """The config of the run; with `keep`, with the number of experts that keeps so much.

    The stage that chooses it goes on after its last finished trial. Raises a `UserError` if no
    share keeps so much.
    """
    if run.config.experts.keep is None:
        config: RunConfig = run.config
        return config
    record = run.json_stage("share", _CHOSEN, partial(_choose, run, dense))
    return _with_experts(run.config, dense, record["active_experts"])


def judge_of(run: Run, dense: DenseModel) -> Callable[[Values], Values]:
    """What accepts the closeness of an export, for `Run.evaluate`; without `keep` anything.

    It raises `MissedError` if the export keeps too little and a larger share is left, and a
    `UserError` if none is.
    """
    wanted = run.config.experts.keep
    if wanted is None:
        return lambda closeness: {}

    def judge(closeness: Values) -> Values:
        chosen = read_json(run.folder.path_of("share") / _CHOSEN)
        worse, active = worse_set(closeness), chosen["active_experts"]
        kept = worse["top1"]
        if kept >= wanted:
            return {"keep": chosen | {"kept": kept, "kept_stderr": worse["top1_stderr"]}}
        if active < _candidates(run.config, dense)[-1]:
            raise MissedError(active, kept)
        raise UserError(
            f"keep is {wanted:g}, but the largest share, {active} of {chosen['num_experts']} "
            f"experts, keeps {to_a_tenth(kept)} once it is exported. The export stays in "
            f"{run.folder.path_of('export')}. Lower keep in another folder, or use the dense model."
        )

    return judge


def take_next(run: Run, missed: MissedError) -> None:
    """Note that an export has missed, so that the next larger share is chosen."""
    wanted, active = run.config.experts.keep, missed.active_experts
    folder = run.folder.path_of("share") / _MISSED
    folder.mkdir(exist_ok=True)
    write_json(folder / f"{active}.json", {"active_experts": active, "kept": missed.kept})
    run.folder.reopen("share")
    run.progress.log(
        f"keep {wanted:g}: the export with {active} experts keeps {to_a_tenth(missed.kept)}; the "
        "next larger share is converted"
    )


def _choose(run: Run, dense: DenseModel, folder: Path) -> Values:
    """The record of the share that a run takes."""
    wanted, candidates = run.config.experts.keep, _candidates(run.config, dense)
    missed = _records(folder / _MISSED)
    if missed:
        active = next(each for each in candidates if each > missed[-1]["active_experts"])
    else:
        active = _smallest(run, dense, candidates, folder / _TRIALS)
    split = _split(run, dense, active)
    record = {"wanted": wanted, "active_experts": active, "num_experts": _all_experts(split)}
    record |= _speed(dense, split) | {"trials": _records(folder / _TRIALS), "missed": missed}
    run.progress.log(f"keep {wanted:g}: {speed_in_words(record)}")
    return record


def _smallest(run: Run, dense: DenseModel, candidates: list[int], folder: Path) -> int:
    """The smallest number of experts of which a trial keeps enough, by bisection."""
    wanted = run.config.experts.keep
    dense_states = states_on(dense, run.own)

    def kept(active: int) -> float:
        done, work = folder / f"{active}.json", folder / str(active)
        if not done.is_file():
            write_json(done, _tried(run, dense, active, dense_states, work))
        remove(work)
        trial = read_json(done)
        run.progress.log(
            f"keep {wanted:g}: a trial with {active} of {trial['num_experts']} experts keeps "
            f"{to_a_tenth(trial['kept'])} of the top tokens"
        )
        return float(trial["kept"])

    folder.mkdir(exist_ok=True)
    place = bisect_left(candidates, wanted, key=kept)
    if place < len(candidates):
        return candidates[place]
    largest = _records(folder)[-1]
    share = largest["active_experts"] / largest["num_experts"]
    most = to_a_tenth(largest["kept"])
    raise UserError(
        f"keep is {wanted:g}, but no share below 100 % keeps so much: {percent(share)} of the "
        f"experts keep {most} of the top tokens. Lower keep in another folder (the answers are "
        "found again), or use the dense model."
    )


def _tried(
    run: Run, dense: DenseModel, active: int, dense_states: dict[str, DenseStates], folder: Path
) -> Values:
    """The record of a trial: a small conversion in memory, measured on held-out answers."""
    split = _split(run, dense, active)
    with (
        run.progress.bar(f"try {active} of {_all_experts(split)} experts") as update,
        ExitStack() as work,
    ):
        layout = _small_layout(run, dense, split, update)
        if run.config.repair:
            work.enter_context(_refitted(run, dense, layout, folder, update))
        work.enter_context(masked_by(dense, layout))
        closeness = closeness_on(dense_states, dense.model, run.own, update)
    return {
        "active_experts": active,
        "num_experts": _all_experts(split),
        "kept": worse_set(closeness)["top1"],
        **{kind: {name: each[name] for name in ("kl", "top1")} for kind, each in closeness.items()},
    }


def _small_layout(
    run: Run, dense: DenseModel, split: Granularity, on_progress: Update
) -> ExpertLayout:
    """Experts and routers from a part of the text."""
    config = run.config
    wanted = config.calibrate.tokens(dense.widths.model)
    state = calibrate(
        dense,
        run.text.training,
        split,
        replace(config.calibrate, calibration_tokens=_part_of(wanted)),
        config.assignment,
        seed=config.seed,
        on_progress=on_progress,
    )
    return extract(state, split, config.assignment)


@contextmanager
def _refitted(
    run: Run, dense: DenseModel, layout: ExpertLayout, folder: Path, on_progress: Update
) -> Iterator[None]:
    """Within this context, the dense model has projections refitted to a part of the text."""
    config = run.config
    wanted = repair_tokens(config.repairing, (layout.granularity,), dense.config)
    how = RepairConfig(repair_tokens=_part_of(wanted), repair_epochs=0)
    folder.mkdir(exist_ok=True)
    repair(
        dense,
        (layout,),
        run.text.training,
        how,
        seed=config.seed,
        folder=folder,
        on_progress=on_progress,
    )
    with with_weights(dense.model) as change:
        for changed in sorted((folder / CHANGES).glob(f"*/{CHANGED}")):
            change(load_file(changed))
        yield


def _part_of(wanted: int) -> int:
    """Tokens that a trial reads where a conversion reads `wanted`."""
    return min(wanted, max(FEWEST_TRIED_TOKENS, wanted // TRIED_PART))


def _candidates(config: RunConfig, dense: DenseModel) -> list[int]:
    """Numbers of active experts to choose from, ascending: eighths below 1 that can be exported."""
    plain = replace(config.experts, keep=None, shared=0.0, first_dense_layers=0)
    dtype = export_dtype(dense, config.export)
    (whole,) = splits_for(config.method, replace(config, experts=plain), dense, dtype)
    experts = whole.num_experts
    found = list[int]()
    refused = list[UserError]()
    shares = {max(1, round(step * experts / _STEPS)) for step in range(1, _STEPS)}
    for active in sorted(shares - {experts}):
        try:
            _exportable_split(config, dense, active)
            found.append(active)
        except UserError as error:
            refused.append(error)
    if not found:
        raise refused[-1]
    return found


def _with_experts(config: RunConfig, dense: DenseModel, active: int) -> RunConfig:
    """The config with a number of active experts, and with the defaults that follow from it."""
    experts = replace(config.experts, keep=None, active_experts=active)
    return with_defaults(
        replace(config, experts=experts), dense, export_dtype(dense, config.export)
    )


def _exportable_split(config: RunConfig, dense: DenseModel, active: int) -> Granularity:
    """The split with so many active experts; refused if no export can hold it."""
    at_share = _with_experts(config, dense, active)
    splits = splits_for(config.method, at_share, dense, export_dtype(dense, config.export))
    require_exportable(dense, splits, config.export)
    return splits[0]


def _split(run: Run, dense: DenseModel, active: int) -> Granularity:
    """The split with so many active experts, and with the dense layers that follow from it."""
    split = _exportable_split(run.config, dense, active)
    if _with_experts(run.config, dense, active).experts.first_dense_layers is not None:
        return split
    leading, _ = leading_outliers(dense, run.text.training, split.active_fraction)
    return replace(split, first_dense_layers=leading)


def _all_experts(split: Granularity) -> int:
    """Number of experts of a layer, those merged into the shared one included."""
    return split.units // split.expert_size


def _speed(dense: DenseModel, split: Granularity) -> Values:
    """What a share costs for a token, beside the dense model."""
    counts = count_parameters(dense.model, dense.family, (split,))
    looked_up = counts.input_embedding if counts.output_head else 0  # a lookup is no product
    operations = counts.active_with_routers - looked_up
    return {
        "active_fraction": split.active_fraction,
        "shared_fraction": split.shared_size / split.units,
        "first_dense_layers": split.first_dense_layers,
        "active_parameters": counts.active,
        "dense_parameters": counts.dense_total,
        "operations_share": operations / (counts.dense_total - looked_up),
    }


def _records(folder: Path) -> list[Values]:
    """The records in a folder, by their number of experts."""
    found = map(read_json, folder.glob("*.json"))
    return sorted(found, key=lambda record: int(record["active_experts"]))
