"""Stage analyse: what became of the experts of a finished run, `6_evaluate/analysis/NAME.json`."""

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from dotmoe.analyse.experts import SEED, outputs_tsne, overlap, sensitivity, utilisation
from dotmoe.analyse.overhead import profile
from dotmoe.analyse.run import AnalyseConfig, AnalysedRun, Findings
from dotmoe.errors import UserError, nearest, require_package
from dotmoe.files import Values, read_json, sha256_of, write_json
from dotmoe.options import check, values_of
from dotmoe.progress import Progress
from dotmoe.run_folder import provenance

FORM = 4
"""Of the result files. To be raised where their content changes, so that they are made anew."""


class Analysis(NamedTuple):
    """One entry of `ANALYSES`."""

    title: str
    make: Callable[[AnalysedRun], Findings]
    package: str | None = None
    """Of the extra that it needs."""
    of_text: bool = True
    """Whether it is about the held-out text; else about the alignment."""
    targets: tuple[str, ...] = ("ffn", "both", "attention")
    """Splits that it can look at."""


ANALYSES = {
    "expert_utilisation": Analysis("Share of the tokens that run each expert", utilisation),
    "routing_overlap": Analysis("Similarity of the routing of layers", overlap, "scipy"),
    "expert_outputs_tsne": Analysis(
        "Outputs of the experts of one layer, by t-SNE",
        outputs_tsne,
        "sklearn",
        targets=("ffn", "both"),
    ),
    "layer_sensitivity": Analysis("What the split of each layer costs by itself", sensitivity),
    "overhead_profile": Analysis(
        "Parts of the time of an alignment step", profile, of_text=False, targets=("ffn",)
    ),
}
"""By name, in the order in which they are made."""


def analyse(
    config: AnalyseConfig, progress: Progress | None = None, command: str | None = None
) -> dict[str, Values]:
    """Make the analyses that the run does not hold yet, for the same inputs, and write each.

    `command` is what was typed, for the record.

    Returns the contents of the result files, by name; those the run has nothing for are left out.
    Raises a `UserError`: no finished run, a number out of range, another process at work in the run
    folder, or an analysis that was asked for by name cannot be made.
    """
    check(config)
    for name in config.only:
        if name not in ANALYSES:
            raise UserError(
                f"{name} is none of the analyses {', '.join(ANALYSES)}.{nearest(name, ANALYSES)}"
            )
    run = AnalysedRun(config, progress or Progress(quiet=True))
    results: dict[str, Values] = {}
    with run.folder.alone():
        inputs: Values = {
            "form": FORM,
            **{k: v for k, v in values_of(config).items() if k not in ("run", "only")},
            "layout": run.fingerprints["layout"],
            "heldout": sha256_of(run.folder.stage("data") / "heldout.safetensors"),
            "metrics": run.aligned and sha256_of(run.aligned.stage("align") / "metrics.jsonl"),
        }
        for name in config.only or ANALYSES:
            try:
                _require(run, name)
            except UserError as error:
                if config.only:
                    raise
                run.progress.log(f"{name} is left out: {error}")
            else:
                results[name] = _result(run, name, inputs, command)
    return results


def _require(run: AnalysedRun, name: str) -> None:
    """Refuse an analysis of what the run does not have, or without the package that it needs."""
    analysis, targets = ANALYSES[name], run.layout.granularity.targets
    if analysis.package:
        require_package(analysis.package, "analysis", name)
    if targets not in analysis.targets:
        raise UserError(
            f"{name} looks at {analysis.targets[0]}, but {run.asked.run} has targets {targets}. "
            "Leave it out."
        )
    if not analysis.of_text and run.aligned is None:
        raise UserError(
            f"{name} looks at alignment steps, and {run.asked.run} has none, or its own run is not "
            "there. Leave it out."
        )


def _result(run: AnalysedRun, name: str, inputs: Values, command: str | None) -> Values:
    """The result file of an analysis: from disk where it was made of the same inputs."""
    analysis = ANALYSES[name]
    file = run.folder.stage("evaluate") / "analysis" / f"{name}.json"
    with suppress(UserError):  # missing or damaged: it is made anew
        stored = read_json(file)
        if stored.get("inputs") == inputs:
            run.progress.log(f"{name} is there already")
            return stored
    run.progress.log(f"{name}:")
    values, sentences = analysis.make(run)
    result = {
        "analysis": name,
        "origin": "measured",
        "title": analysis.title,
        "tokens": run.tokens.numel() if analysis.of_text else 0,
        "text": list(run.text.heldout_name) if analysis.of_text else [],
        "values": values,
        "says": sentences,
        "inputs": inputs,
        "command": command,
        "provenance": provenance(SEED),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, result)
    return result
