"""Stage analyse: examine the experts of a finished run; writes `6_evaluate/analysis/NAME.json`."""

from collections.abc import Callable
from typing import NamedTuple

from dotmoe.common.errors import UserError
from dotmoe.common.files import Values, write_json
from dotmoe.common.options import checked
from dotmoe.common.progress import Progress
from dotmoe.measure.analyse.experts import SEED, outputs_tsne, require_tsne, utilisation
from dotmoe.measure.analyse.run import AnalysedRun, Findings
from dotmoe.measure.config import AnalyseConfig
from dotmoe.run.folder import provenance


class Analysis(NamedTuple):
    """One entry of `ANALYSES`."""

    title: str
    make: Callable[[AnalysedRun], Findings]
    require: Callable[[AnalysedRun], None] = lambda run: None
    """Raises a `UserError` if the run or the installed packages lack what the analysis needs."""


ANALYSES = {
    "expert_utilisation": Analysis("Share of the tokens that run each expert", utilisation),
    "expert_outputs_tsne": Analysis(
        "Outputs of the experts of one layer, by t-SNE", outputs_tsne, require_tsne
    ),
}
"""All analyses by name, in the order in which they run."""


def analyse(config: AnalyseConfig, progress: Progress | None = None) -> dict[str, Values]:
    """Run each analysis on the held-out text, and write its result file.

    Returns the contents of the result files by name, without analyses that do not apply to the run.
    Raises a `UserError` if the run is not finished, a number is out of range, another process works
    in the run folder, or an analysis that was requested by name cannot be made.
    """
    config = checked(config)
    run = AnalysedRun(config, progress or Progress(quiet=True))
    results: dict[str, Values] = {}
    with run.folder.alone():
        for name in config.only or ANALYSES:
            analysis = ANALYSES[name]
            try:
                analysis.require(run)
            except UserError as error:
                if config.only:
                    raise
                run.progress.log(f"{name} is left out: {error}")
                continue
            run.progress.log(f"{name}:")
            values, sentences = analysis.make(run)
            results[name] = {
                "analysis": name,
                "origin": "measured",
                "title": analysis.title,
                "tokens": run.tokens.numel(),
                "text": list(run.text.heldout_name),
                "values": values,
                "says": sentences,
                "provenance": provenance(SEED),
            }
            write_json(run.folder.stage("evaluate") / "analysis" / f"{name}.json", results[name])
    return results
