"""Stage analyse: examine the experts of a finished run; writes `6_evaluate/analysis/NAME.json`."""

from collections.abc import Callable
from typing import NamedTuple

from dotmoe.common.errors import UserError, require_package
from dotmoe.common.files import Values, write_json
from dotmoe.common.options import checked
from dotmoe.common.progress import Progress
from dotmoe.measure.analyse.experts import SEED, outputs_tsne, utilisation
from dotmoe.measure.analyse.overhead import profile
from dotmoe.measure.analyse.run import AnalysedRun, Findings
from dotmoe.measure.config import AnalyseConfig
from dotmoe.method.granularity import targets_of
from dotmoe.method.layout import splits_in
from dotmoe.run.folder import provenance


class Analysis(NamedTuple):
    """One entry of `ANALYSES`."""

    title: str
    make: Callable[[AnalysedRun], Findings]
    package: str | None = None
    """Import name of the optional package that it needs, if any."""
    of_text: bool = True
    """Whether it analyses the held-out text; otherwise it analyses the alignment."""
    targets: tuple[str, ...] = ("ffn", "both", "attention")
    """Values of `--targets` that it supports."""


ANALYSES = {
    "expert_utilisation": Analysis("Share of the tokens that run each expert", utilisation),
    "expert_outputs_tsne": Analysis(
        "Outputs of the experts of one layer, by t-SNE",
        outputs_tsne,
        "sklearn",
        targets=("ffn", "both"),
    ),
    "overhead_profile": Analysis(
        "Time of an alignment step, by part", profile, of_text=False, targets=("ffn",)
    ),
}
"""All analyses by name, in the order in which they run."""


def analyse(
    config: AnalyseConfig, progress: Progress | None = None, command: str | None = None
) -> dict[str, Values]:
    """Run each analysis and write its result file.

    `command` is the command line as typed, to be recorded in the result.
    Returns the contents of the result files by name, without analyses that do not apply to the run.
    Raises a `UserError` if the run is not finished, a number is out of range, another process works
    in the run folder, or an analysis that was requested by name cannot be made.
    """
    config = checked(config)
    run = AnalysedRun(config, progress or Progress(quiet=True))
    results: dict[str, Values] = {}
    with run.folder.alone():
        for name in config.only or ANALYSES:
            try:
                _require(run, name)
            except UserError as error:
                if config.only:
                    raise
                run.progress.log(f"{name} is left out: {error}")
            else:
                results[name] = _result(run, name, command)
    return results


def _require(run: AnalysedRun, name: str) -> None:
    """Raise a `UserError` if the run or the installed packages lack what the analysis needs."""
    analysis, targets = ANALYSES[name], targets_of(splits_in(run.layouts))
    if analysis.package:
        require_package(analysis.package, "analysis", name)
    if targets not in analysis.targets:
        raise UserError(
            f"{name} needs targets {analysis.targets[0]}, but {run.asked.run} has {targets}. "
            "Leave it out."
        )
    if not analysis.of_text and run.aligned is None:
        raise UserError(
            f"{name} times alignment steps, but {run.asked.run} has none, or the run that it was "
            "finetuned from is missing. Leave it out."
        )


def _result(run: AnalysedRun, name: str, command: str | None) -> Values:
    """Contents of an analysis's result file, which it writes."""
    analysis = ANALYSES[name]
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
        "command": command,
        "provenance": provenance(SEED),
    }
    write_json(run.folder.stage("evaluate") / "analysis" / f"{name}.json", result)
    return result
