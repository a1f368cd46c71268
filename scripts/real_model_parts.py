"""Collect into a result file how close finished runs of one dense model stay to it.

    python scripts/real_model_parts.py results/smollm2_parts.json 'the start=RUN' ...

First run `dotmoe evaluate RUN --against DENSE --text TEXT --fidelity --out RUN/near-TEXT`.
"""

import sys
from pathlib import Path
from typing import Any

from dotmoe.common.files import read_json, write_json
from dotmoe.export.record import ExportRecord
from dotmoe.pipeline import compare
from dotmoe.run.config import RunConfig
from dotmoe.run.finished import FinishedRun
from dotmoe.run.folder import provenance


def row(name: str, run: Path) -> dict[str, Any]:
    """One run: its experts, its tokens, its nats above dense, and its KL by text."""
    finished, results = FinishedRun(run), read_json(run / "6_evaluate" / "results.json")
    export = ExportRecord.load(run / "5_export")
    near = {file.parent.name: read_json(file) for file in sorted(run.glob("near-*/fidelity.json"))}
    return {
        "name": name,
        "active_experts": export.active_experts,
        "num_experts": export.num_experts,
        "shared_size": export.shared_size,
        "text_tokens": text_tokens(finished, results),
        "commit": results["provenance"]["commit"],
        "nats_above_dense": results["moe"]["loss"] - results["dense"]["loss"],
        "kl": {text.removeprefix("near-"): found["kl"] for text, found in near.items()},
    }


def text_tokens(finished: FinishedRun, results: dict[str, Any]) -> int:
    """Tokens of text that a run was given; a finetune's are counted without its source's."""
    config = finished.config
    if not isinstance(config, RunConfig):
        return int(results["tokens"])
    read = compare.text_tokens(config, results["steps"], finished.described())
    return int(read + results.get("repair", {}).get("tokens", 0))


def main() -> None:
    out, *runs = sys.argv[1:]
    rows = [row(name, Path(run)) for name, run in (each.split("=", 1) for each in runs)]
    commits = ", ".join(dict.fromkeys(each["commit"] for each in rows))
    record = {"origin": "measured", "rows": rows}
    write_json(Path(out), record | {"provenance": provenance(0) | {"commit": commits}})


if __name__ == "__main__":
    main()
