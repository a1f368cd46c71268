"""The runs of a comparison: one config for each method, variant and seed, on one budget."""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from dotmoe.common.errors import UserError
from dotmoe.method.config import AlignConfig, CalibrateConfig, ExpertsConfig
from dotmoe.rivals.baselines import METHODS
from dotmoe.rivals.pruning import PRUNING
from dotmoe.run.config import PAPER, CompareConfig, PruneRunConfig, RunConfig

_OURS, _PAPERS = "dotmoe", "DOT-MoE (paper)"
"""Names of rows of `dot_moe`: this project's recipe, and the paper's."""


class Point(NamedTuple):
    """One run of a comparison: the name of its method, and its config."""

    method: str
    config: RunConfig

    @property
    def name(self) -> str:
        """Name of the subfolder of this run."""
        return Path(self.config.out).name


def points_of(config: CompareConfig, read: int | None = None) -> list[Point]:
    """The runs of a comparison, in the order of its table; pruning methods `read` these tokens."""
    plain = _plain(config)
    methods = config.methods
    if not methods:
        raise UserError("methods names none. Name at least one, or omit it for the default.")
    seeds = config.seeds or (config.seed,)
    if "all" in methods:
        methods = ("dot_moe", *METHODS, *PRUNING)
    found = list[Point]()
    for method in methods:
        for seed in seeds:
            found += _points_of(method, replace(plain, seed=seed), config, read)
    return list(dict.fromkeys(found))  # runs that have no seed come once


def _plain(config: RunConfig) -> RunConfig:
    """The options of a conversion in the config of a comparison."""
    if not config.eval_text:
        raise UserError(
            "eval_text names no text. All runs are compared on the same text, which no run trains "
            "on: give --eval-text."
        )
    plain = RunConfig(**{field.name: getattr(config, field.name) for field in fields(RunConfig)})
    # No run measures how many layers to keep dense, so that all have one budget.
    first = plain.experts.first_dense_layers or 0
    return replace(plain, experts=replace(plain.experts, first_dense_layers=first))


def _points_of(
    method: str, plain: RunConfig, comparison: CompareConfig, read: int | None
) -> Iterator[Point]:
    """Yield the runs of one method with one seed; `plain` is the config that all methods share."""
    if method in PRUNING:
        yield _pruning_point(method, plain, comparison, read)
        return
    if method == "dot_moe":
        changes = _variants_of_ours(plain)
    else:
        if not METHODS[method].has_shared_expert:
            plain = replace(plain, experts=replace(plain.experts, shared=0.0))
        changes = _variants_of_rival(method, plain)
    shared = replace(plain, method=method, baseline=replace(plain.baseline, router_steps=0))
    suffix = f"-seed{plain.seed}" if comparison.seeds else ""
    for variant, change in changes.items():
        name = method
        if method == "dot_moe":
            name = _PAPERS if variant == "paper" else _OURS
        out = Path(plain.out) / f"{method}-{variant}{suffix}"
        yield Point(name, replace(shared, out=str(out), **change))


def _pruning_point(
    method: str, plain: RunConfig, comparison: CompareConfig, read: int | None
) -> Point:
    """The run of a pruning method; an option that it does not read does not change its identity."""
    name = method
    align = AlignConfig(steps=0)
    seed = 0
    if PRUNING[method].is_trained:
        align = AlignConfig(steps=comparison.mask_steps, batch_size=plain.align.batch_size)
        seed = plain.seed
        if comparison.seeds:
            name += f"-seed{seed}"
    config = PruneRunConfig(
        model=plain.model,
        data=plain.data,
        answers=plain.answers,
        load=plain.load,
        eval_text=plain.eval_text,
        other_text=plain.other_text,
        eval_tokens=plain.eval_tokens,
        out=str(Path(plain.out) / name),
        method=method,
        experts=ExpertsConfig() if PRUNING[method].is_fixed else plain.experts,
        calibrate=CalibrateConfig(calibration_tokens=read),
        align=align,
        seed=seed,
    )
    return Point(method, config)


def _variants_of_ours(plain: RunConfig) -> dict[str, dict[str, Any]]:
    """What the runs of DOT-MoE change of the shared config, by the end of their folders' names."""
    changes: dict[str, dict[str, Any]] = {"untrained": {"align": replace(plain.align, steps=0)}}
    steps = plain.baseline.router_steps
    if not steps:
        return changes
    for variant, learns in (("router", False), ("trained", True)):
        align = replace(plain.align, steps=steps, learn_assignment=learns)
        changes[variant] = {"align": align}
    paper = replace(
        PAPER.align,
        steps=steps,
        batch_size=plain.align.batch_size,
        max_epochs=plain.align.max_epochs,
    )
    changes["paper"] = {
        "experts": replace(plain.experts, shared=0.0),
        "calibrate": PAPER.calibrate,
        "assignment": PAPER.assignment,
        "align": paper,
        "repair": False,
    }
    return changes


def _variants_of_rival(method: str, plain: RunConfig) -> dict[str, dict[str, Any]]:
    """What the runs of another method change of the shared config: the router, and its training."""
    options = replace(plain.baseline, router_steps=0)
    changes = {"own": {"baseline": replace(options, split_router="own")}}
    if METHODS[method].experts_of or METHODS[method].is_static:  # ridge: rows of another method
        return changes
    ridge = replace(options, split_router="ridge")
    changes["ridge"] = {"baseline": ridge}
    steps = plain.baseline.router_steps
    if steps:
        changes["trained"] = {"baseline": replace(ridge, router_steps=steps)}
    return changes
