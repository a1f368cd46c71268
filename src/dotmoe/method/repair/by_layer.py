"""The repair itself: layer by layer, pose a problem, solve it, and write the new weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dotmoe.common.distributed import broadcast_from_rank_zero, num_ranks, raise_on_all_ranks
from dotmoe.common.errors import UserError
from dotmoe.common.files import (
    DamagedError,
    checksums,
    complete_folder,
    damage_in,
    read_json,
    remove,
    save_tensors,
    write_json,
)
from dotmoe.common.precision import in_float32
from dotmoe.common.progress import Update, no_update
from dotmoe.common.seeds import generator_for
from dotmoe.method.config import RepairConfig
from dotmoe.method.layout import ExpertLayout, Layouts, save_layouts
from dotmoe.method.masked import masked
from dotmoe.method.repair.ffn_training import train_ffn
from dotmoe.method.repair.problem import LayerProblem
from dotmoe.method.repair.refit import equations, refit
from dotmoe.method.repair.streams import Streams, with_weights
from dotmoe.models.checkpoint import CHANGED, Tensors
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.load import CHANGES, whole_weights
from dotmoe.text.blocks import TokenBlocks

REPAIR_METRICS = "repair.json"
"""Metrics: the stage's, and each layer's beside its weights."""
_CHECKSUMS = "checksums.json"
"""File of a layer's folder with the checksums of the others."""
_SHARE_OF_CHANGE = 0.8
"""Share of what a repair changes that the export keeps: with all of it, models lose more on text
unlike the fit's (docs/dev/decisions.md). Later layers are repaired behind the whole change."""


@torch.no_grad()
@in_float32()
def repair(
    dense: DenseModel,
    layouts: Layouts,
    blocks: TokenBlocks,
    config: RepairConfig,
    *,
    seed: int,
    folder: Path,
    on_progress: Update = no_update,
) -> dict[str, Any]:
    """Change FFNs or W_O of each split layer, so that the masked model follows the dense one.

    Two residual streams go through the layers side by side: the dense model's, and that of the
    masked model as repaired so far. In each split FFN or attention, weights change so that the
    second comes as close as it can to the first, token by token relative to its size. In an FFN
    Adam trains all projections, for `repair_epochs`. Ridge regression refits the output projection
    of attention; and of FFNs without epochs, or where rows held out do not gain from the training.
    Every 8th row of text is held out for that and to choose the penalty. Four fifths of either
    change are kept. `seed` sets the order of the tokens in the training of each layer. A stopped
    process resumes after the finished layers, with the same result. Ranks divide the text and call
    this together. The weights of `dense` are in memory or on disk, and unchanged afterwards, also
    after an exception.

    `folder` receives the new projections in the dtypes of the source (`CHANGES`, to be read by
    `describe_trained`), `layout.safetensors` and `repair.json`.

    Returns the contents of `repair.json`: `tokens`, `active_experts`, and for each of `layers`
    (and, with attention, each `target`) the `ridge`, None for no refit, the share `kept` of the
    change, and the `heldout_error` of all of it, a share of the masked dense weights'.
    Raises a `UserError` if there is too little text, or ranks are more than neurons of an expert.
    """
    dense.require("memory", "disk")
    raise_on_all_ranks(lambda: _require_parts(layouts[0], config))
    streams = Streams(dense, layouts, blocks, config)
    solutions = _Solutions(dense, Tensors.of(dense), config, seed, folder)
    for index in streams.layers:
        with whole_weights(dense, index), with_weights(dense.model) as replace:
            streams.advance_dense(index)
            with masked(dense, streams.maskings.values(), only=[index]):
                for target in streams.targets:
                    replace(solutions.of(streams.advance_to(index, target)))
                    error = f"error {solutions.metrics[-1]['heldout_error']:.3f}"
                    on_progress(index + 1, layouts[0].num_layers, error)
                streams.advance_masked(index)
    served = [layout.active_experts for layout in layouts]
    record = {"tokens": streams.num_tokens, "active_experts": served, "layers": solutions.metrics}

    def finish() -> None:
        save_layouts(layouts, folder)
        write_json(folder / REPAIR_METRICS, record)

    broadcast_from_rank_zero(finish)
    return record


@dataclass
class _Solutions:
    """The solutions of the layers, in the folder of a repair."""

    dense: DenseModel
    stored: Tensors
    config: RepairConfig
    seed: int
    folder: Path
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """Of each layer (and target) up to now."""

    def of(self, problem: LayerProblem) -> dict[str, Tensor]:
        """The weights that later layers are repaired behind, by name in the model.

        A problem that a stopped process has solved is not solved again, unless its files were
        damaged since.
        """
        layer = self.folder / CHANGES / f"{problem.layer:05d}_{problem.target.name}"
        if not broadcast_from_rank_zero(partial(_is_whole, layer)):
            weights, metrics = self.solution(problem)
            broadcast_from_rank_zero(partial(self._write, layer, problem, weights, metrics))
        self.metrics.append(read_json(layer / REPAIR_METRICS))
        changed: dict[str, Tensor] = load_file(layer / CHANGED)
        kept = self.metrics[-1].get("kept")
        if kept:
            return _whole_change(self.dense, changed, kept)
        return changed

    def solution(self, problem: LayerProblem) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """New weights of one FFN or attention, by name in the model, and metrics."""
        if problem.target.name == "ffn" and self.config.repair_epochs:
            solution = self._solve_by_training(problem)
            if solution is not None:
                return solution
        return self._solve_by_ridge(problem)

    def _solve_by_training(
        self, problem: LayerProblem
    ) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Part of what training changes in an FFN; None if held-out tokens do not gain."""
        generator = generator_for(self.seed, "ffn", problem.layer)
        weights, error = train_ffn(problem, self.config.repair_epochs, generator)
        if not weights:
            return None
        metrics = {"ridge": None, "kept": _SHARE_OF_CHANGE, "heldout_error": error}
        return _part_of_change(self.dense, weights, _SHARE_OF_CHANGE), metrics

    def _solve_by_ridge(self, problem: LayerProblem) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Part of what the refit changes in the output projection; all as it was if none gains."""
        output_DN, ridge, error = refit(problem.output, *equations(problem), self._last_ridge())
        weights = {problem.output_name: output_DN}
        metrics: dict[str, Any] = {"ridge": ridge, "heldout_error": error}
        if ridge is not None:
            metrics["kept"] = _SHARE_OF_CHANGE
            weights = _part_of_change(self.dense, weights, _SHARE_OF_CHANGE)
        if problem.target.name == "attention":
            metrics = {"target": "attention", **metrics}
        return weights, metrics

    def _last_ridge(self) -> float | None:
        """The penalty of the last refit that gained; None if there is none yet."""
        for metrics in reversed(self.metrics):
            if metrics["ridge"]:
                ridge: float = metrics["ridge"]
                return ridge
        return None

    def _write(
        self,
        layer: Path,
        problem: LayerProblem,
        weights: dict[str, Tensor],
        metrics: dict[str, Any],
    ) -> None:
        """Write what one layer got, in the dtype of the source, whole or not at all."""
        _, dtype = self.stored.describe(problem.target.output_tensor(problem.layer))
        tensors = {name: weight.to(dtype) for name, weight in weights.items()}
        remove(layer)  # which may be damaged
        with complete_folder(layer) as partial_folder:
            save_tensors(tensors, partial_folder / CHANGED)
            write_json(partial_folder / REPAIR_METRICS, {"layer": problem.layer, **metrics})
            whole = checksums(partial_folder, [CHANGED, REPAIR_METRICS])
            write_json(partial_folder / _CHECKSUMS, whole)


def _is_whole(layer: Path) -> bool:
    """Whether a layer is there and as it was written; an older one has no checksums."""
    if not (layer / _CHECKSUMS).exists():
        return (layer / CHANGED).is_file() and (layer / REPAIR_METRICS).is_file()
    try:
        return damage_in(layer, read_json(layer / _CHECKSUMS)) is None
    except DamagedError:
        return False


def _part_of_change(
    dense: DenseModel, changed: Mapping[str, Tensor], share: float
) -> dict[str, Tensor]:
    """The model's own weights with a share of the change to `changed`, in float32, by name."""
    own = {name: dense.model.get_parameter(name).detach().float() for name in changed}
    return {name: own[name].lerp(weight.to(own[name]), share) for name, weight in changed.items()}


def _whole_change(
    dense: DenseModel, changed: Mapping[str, Tensor], kept: float
) -> dict[str, Tensor]:
    """The weights with the whole change, of which `changed` has the share `kept`."""
    return _part_of_change(dense, changed, 1 / kept)


def _require_parts(layout: ExpertLayout, config: RepairConfig) -> None:
    """Refuse to train more parts of an expert than it has neurons."""
    if config.repair_epochs and layout.target == "ffn" and layout.expert_size < num_ranks():
        raise UserError(
            f"experts have {layout.expert_size} neurons, but {num_ranks()} ranks divide each to "
            f"train it. Start at most {layout.expert_size} ranks, or give --repair-epochs 0."
        )
