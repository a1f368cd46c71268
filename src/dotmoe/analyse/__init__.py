"""Stage analyse: what became of the experts of a finished run, `6_evaluate/analysis/NAME.json`.

An analysis is a module with `values`, made of a run, and `says`, the same in a few sentences.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from dotmoe.analyse import history, outputs, overhead, overlap, utilisation
from dotmoe.analyse.run import AnalyseConfig, AnalysedRun
from dotmoe.errors import UserError, nearest
from dotmoe.files import read_json, sha256_of, write_json
from dotmoe.options import check
from dotmoe.progress import Progress
from dotmoe.provenance import provenance

__all__ = ["ANALYSES", "AnalyseConfig", "Analysis", "analyse"]

FOLDER = "analysis"
"""Subfolder of `6_evaluate`."""

FORM = 3
"""Of the result files. To be raised where their content changes, so that they are made anew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """One entry of `ANALYSES`."""

    title: str
    values: Callable[[AnalysedRun], dict[str, Any]]
    says: Callable[[dict[str, Any]], list[str]]
    """What `values` come to, as sentences."""
    options: tuple[str, ...] = ()
    """Options that the result depends on."""
    packages: tuple[str, ...] = ()
    """Of the extra that it needs."""
    of_text: bool = True
    """Whether it is about the held-out text; else about the alignment."""

    def lack(self, run: AnalysedRun) -> str | None:
        """Why it cannot be made of this run, or None."""
        missing = [package for package in self.packages if find_spec(package) is None]
        if missing:
            return f"{missing[0]} is not installed; pip install 'dotmoe[analysis]' brings it"
        if not self.of_text and run.aligned is None:
            return f"{run.config.run} has no alignment steps, or its own run is not there"
        return None

    def inputs(self, run: AnalysedRun) -> dict[str, Any]:
        """What the result depends on; with the same, it is not made again."""
        if self.of_text:
            made = run.folder.stage("finetune" if run.is_finetuned else "extract")
            heldout = run.folder.stage("data") / "heldout.safetensors"
            of: dict[str, Any] = {
                "layout": sha256_of(made / "layout.safetensors"),
                "heldout": sha256_of(heldout),
                "tokens": run.tokens.numel(),
            }
        else:
            assert run.aligned is not None  # `lack` says otherwise
            of = {"metrics": sha256_of(run.aligned.stage("align") / "metrics.jsonl")}
        return {"form": FORM, **of, **{name: run.option(name) for name in self.options}}


ANALYSES = {
    "expert_utilisation": Analysis(
        title="Share of the tokens that run each expert",
        values=utilisation.values,
        says=utilisation.says,
    ),
    "routing_overlap": Analysis(
        title="Similarity of the routing of layers",
        values=overlap.values,
        says=overlap.says,
        packages=("scipy",),
    ),
    "expert_outputs_tsne": Analysis(
        title="Outputs of the experts of one layer, by t-SNE",
        values=outputs.values,
        says=outputs.says,
        options=("points", "experts_shown", "layer", "seed"),
        packages=("sklearn",),
    ),
    "alignment_history": Analysis(
        title="Alignment, step by step",
        values=history.values,
        says=history.says,
        of_text=False,
    ),
    "overhead_profile": Analysis(
        title="Parts of the time of an alignment step",
        values=overhead.values,
        says=overhead.says,
        options=("device", "dtype", "profile_steps"),
        of_text=False,
    ),
}
"""By name, in the order in which they are made."""


def analyse(
    config: AnalyseConfig, progress: Progress | None = None, command: str | None = None
) -> dict[str, dict[str, Any]]:
    """Make the analyses that the run does not hold yet, for the same inputs, and write each.

    `command` is what was typed, for the record.

    Returns:
        Contents of the result files, by name; those the run has nothing for are left out, which
        `progress` says.

    Raises:
        UserError: No finished run there, a number out of range, another process at work in the
            run folder, or an analysis was asked for by name that cannot be made.
    """
    check(config)
    for name in config.only:
        if name not in ANALYSES:
            raise UserError(
                f"{name} is none of the analyses {', '.join(ANALYSES)}.{nearest(name, ANALYSES)}"
            )
    run = AnalysedRun(config, progress or Progress(quiet=True))
    results: dict[str, dict[str, Any]] = {}
    with run.folder.alone():
        for name in config.only or ANALYSES:
            lack = ANALYSES[name].lack(run)
            if lack is None:
                results[name] = _result(run, name, command)
            elif config.only:
                raise UserError(f"{name} cannot be made: {lack}.")
            else:
                run.progress.log(f"{name} left out: {lack}")
    return results


def _result(run: AnalysedRun, name: str, command: str | None) -> dict[str, Any]:
    """The result file of an analysis: from disk where it was made of the same inputs."""
    analysis, file = ANALYSES[name], run.folder.stage("evaluate") / FOLDER / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    inputs = json.loads(json.dumps(analysis.inputs(run)))  # as it will be read
    try:
        known = read_json(file)
    except UserError:  # missing or damaged: it is made anew
        known = {}
    if known.get("inputs") == inputs:
        run.progress.log(f"{name} is there already")
        return known
    run.progress.log(f"{name}:")
    values = analysis.values(run)
    result = {
        "analysis": name,
        "origin": "measured",
        "title": analysis.title,
        "tokens": run.tokens.numel() if analysis.of_text else 0,
        "text": run.text if analysis.of_text else [],
        "values": values,
        "says": analysis.says(values),
        "inputs": inputs,
        "command": command,
        "provenance": provenance(run.config.seed),
    }
    write_json(file, result)
    return result
