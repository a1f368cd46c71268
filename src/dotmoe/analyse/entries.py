"""The analyses: what each is made of, what it depends on, and what it needs."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from dotmoe.analyse.config import AnalysisName
from dotmoe.analyse.run import AnalysedRun
from dotmoe.analysis import (
    ProfiledRun,
    expert_outputs_tsne,
    expert_utilisation,
    kept_from_start,
    metric_columns,
    overhead_profile,
    routing_overlap,
    sampled_pairs,
    settling,
)
from dotmoe.artifacts import AlignState
from dotmoe.checksums import sha256_of
from dotmoe.config import RunConfig
from dotmoe.device import resolved_device
from dotmoe.export.architecture import granularity_of
from dotmoe.layout import ExpertLayout
from dotmoe.load import load_dense
from dotmoe.run_folder import RunFolder
from dotmoe.tokenise import load_blocks

EXTRA = "pip install 'dotmoe[analysis]'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """One entry of `ANALYSES`."""

    title: str
    values: Callable[[AnalysedRun], dict[str, Any]]
    inputs: Callable[[AnalysedRun], dict[str, Any]]
    """What the result depends on; with the same, it is not made again."""
    packages: tuple[str, ...] = ()
    """Of the extra."""
    routes_text: bool = True
    """Whether it is about the held-out text; else about the alignment."""

    def lack(self, run: AnalysedRun) -> str | None:
        """Why it cannot be made of this run, or None."""
        missing = [package for package in self.packages if find_spec(package) is None]
        if missing:
            return f"{missing[0]} is not installed; {EXTRA} brings it"
        if not self.routes_text and run.aligned is None:
            return f"{run.config.run} has no alignment steps, or its own run is not there"
        return None


def _of_text(run: AnalysedRun) -> dict[str, Any]:
    stage = "finetune" if run.found.is_finetuned else "extract"
    heldout = run.folder.stage("data") / "heldout.safetensors"
    return {
        "layout": sha256_of(run.folder.stage(stage) / "layout.safetensors"),
        "heldout": sha256_of(heldout),
        "tokens": run.tokens.numel(),
    }


def _of_outputs(run: AnalysedRun) -> dict[str, Any]:
    config = run.config
    wanted = {"points": config.points, "experts_shown": config.experts_shown}
    return _of_text(run) | wanted | {"layer": run.layer, "seed": config.seed}


def _of_alignment(run: AnalysedRun) -> dict[str, Any]:
    folder = _aligned(run).stage("align")
    return {"metrics": sha256_of(folder / "metrics.jsonl")}


def _of_profile(run: AnalysedRun) -> dict[str, Any]:
    load = run.config.load
    where = {"device": str(resolved_device(load.device)), "dtype": load.dtype}
    return _of_alignment(run) | where | {"profile_steps": run.config.profile_steps}


def _outputs(run: AnalysedRun) -> dict[str, Any]:
    config = run.config
    chosen_TK = run.routes.chosen_LTK[run.layers.index(run.layer)]
    sample = sampled_pairs(
        chosen_TK,
        run.layout.num_experts,
        points=config.points,
        shown=config.experts_shown,
        seed=config.seed,
    )
    return expert_outputs_tsne(run.dense, run.layout, run.tokens, run.layer, sample, config.seed)


def _history(run: AnalysedRun) -> dict[str, Any]:
    folder = _aligned(run)
    columns = metric_columns(folder.intact("align") / "metrics.jsonl")
    config = folder.config(RunConfig)
    kept = None
    if config.align.learn_assignment and config.method == "dot_moe":
        start = AlignState.load(
            folder.intact("calibrate") / "state.safetensors", torch.device("cpu")
        )
        layout = ExpertLayout.load(folder.intact("extract") / "layout.safetensors")
        kept = kept_from_start(
            start.affinity_LNE, layout.expert_of_neuron_LN, config.assignment, layout.moe_layers
        )
    return columns | {"settling": settling(columns), "kept_from_start": kept}


def _profile(run: AnalysedRun) -> dict[str, Any]:
    folder = _aligned(run)
    config = folder.config(RunConfig)
    blocks = load_blocks(folder.intact("data"))[0]
    layout = ExpertLayout.load(folder.intact("extract") / "layout.safetensors")
    dense = run.dense if not run.found.is_finetuned else load_dense(config.model, run.config.load)
    profiled = ProfiledRun(
        blocks=blocks,
        state=AlignState.load(folder.intact("align") / "state.safetensors", dense.device),
        granularity=granularity_of(layout),
        align=config.align,
        assignment=config.assignment,
        seed=config.seed,
    )
    return overhead_profile(dense, profiled, run.config.profile_steps)


def _aligned(run: AnalysedRun) -> RunFolder:
    assert run.aligned is not None  # `lack` has said so
    return run.aligned


ANALYSES: dict[AnalysisName, Analysis] = {
    "expert_utilisation": Analysis(
        title="Share of the tokens that run each expert",
        values=lambda run: expert_utilisation(run.routes),
        inputs=_of_text,
    ),
    "routing_overlap": Analysis(
        title="Similarity of the routing of layers",
        values=lambda run: routing_overlap(run.routes, run.config.seed),
        inputs=lambda run: _of_text(run) | {"seed": run.config.seed},
        packages=("scipy",),
    ),
    "expert_outputs_tsne": Analysis(
        title="Outputs of the experts of one layer, by t-SNE",
        values=_outputs,
        inputs=_of_outputs,
        packages=("sklearn",),
    ),
    "alignment_history": Analysis(
        title="Alignment, step by step",
        values=_history,
        inputs=_of_alignment,
        routes_text=False,
    ),
    "overhead_profile": Analysis(
        title="Parts of the time of an alignment step",
        values=_profile,
        inputs=_of_profile,
        routes_text=False,
    ),
}
"""By name, in the order in which they are made."""
