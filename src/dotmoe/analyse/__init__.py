"""Analyses of a finished run: `6_evaluate/analysis/NAME.json`, each made once."""

import json
from pathlib import Path
from typing import Any

from dotmoe.analyse.config import AnalyseConfig, AnalysisName
from dotmoe.analyse.entries import ANALYSES, Analysis
from dotmoe.analyse.run import AnalysedRun
from dotmoe.errors import UserError
from dotmoe.narration import Narrator
from dotmoe.run_folder import provenance, read_json, write_json

__all__ = ["ANALYSES", "AnalyseConfig", "AnalysisName", "analyse"]

FOLDER = "analysis"
"""Subfolder of `6_evaluate`."""

FORM = 1
"""Of the result files. To be raised where their content changes, so that they are made anew."""


def analyse(config: AnalyseConfig, narrator: Narrator | None = None) -> dict[str, dict[str, Any]]:
    """Make the analyses that the run does not hold yet, for the same inputs, and write each.

    Args:
        config: The run, and which analyses.
        narrator: Shows the progress.

    Returns:
        Contents of the result files, by name; those the run has nothing for are left out, which
        the narrator says.

    Raises:
        UserError: No finished run there, a number out of range, another process at work in the
            run folder, or an analysis was asked for by name that cannot be made.
    """
    config.check()
    run = AnalysedRun(config, narrator or Narrator(quiet=True))
    results: dict[str, dict[str, Any]] = {}
    with run.folder.alone():
        for name, analysis in ANALYSES.items():
            if config.only and name not in config.only:
                continue
            lack = analysis.lack(run)
            if lack is None:
                results[name] = _result(run, name, analysis)
            elif config.only:
                raise UserError(f"{name} cannot be made: {lack}.")
            else:
                run.narrator.say(f"{name} left out: {lack}")
    return results


def _result(run: AnalysedRun, name: str, analysis: Analysis) -> dict[str, Any]:
    """The result file of an analysis: from disk where it was made of the same inputs."""
    folder = run.folder.stage("evaluate") / FOLDER
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.json"
    inputs = json.loads(json.dumps({"form": FORM} | analysis.inputs(run)))  # as it will be read
    known = _known(file)
    if known.get("inputs") == inputs:
        run.narrator.say(f"{name} is there already")
        return known
    run.narrator.say(f"{name}:")
    result = {
        "analysis": name,
        "origin": "measured",
        "title": analysis.title,
        "tokens": run.tokens.numel() if analysis.routes_text else 0,
        "text": run.text if analysis.routes_text else [],
        "values": analysis.values(run),
        "inputs": inputs,
        "provenance": provenance(run.config.seed),
    }
    write_json(file, result)
    return result


def _known(file: Path) -> dict[str, Any]:
    """What a result file holds; {} where it is missing or damaged, which makes it anew."""
    try:
        return read_json(file)
    except (OSError, ValueError):
        return {}
