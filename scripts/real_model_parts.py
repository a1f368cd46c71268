"""Gather how near finished runs stay to their one dense model into a result file.

    python scripts/real_model_parts.py results/smollm2_parts.json 'the start=RUN' ...

Each RUN was given `dotmoe evaluate RUN --against DENSE --text TEXT --out RUN/near-TEXT`, once more
with `--fidelity`; so was each TEXT's folder for all of them.
"""

import sys
from pathlib import Path
from typing import Any

from dotmoe.export.record import ExportRecord
from dotmoe.files import read_json, write_json
from dotmoe.provenance import provenance


def row(name: str, run: Path) -> dict[str, Any]:
    """What one run is, the text that it was given, and by text its KL and nats above dense."""
    results, text = (
        read_json(run / each) for each in ("6_evaluate/results.json", "0_data/data.json")
    )
    export, near = ExportRecord.load(run / "5_export"), dict[str, Any]()
    for folder in sorted(run.glob("near-*")):
        kl, loss = (read_json(folder / f"{each}.json") for each in ("fidelity", "perplexity"))
        above = loss["model"]["loss"] - loss["against"]["loss"]
        near[folder.name.removeprefix("near-")] = {"kl": kl["kl"], "nats_above_dense": above}
    return {
        "name": name,
        "active_experts": export.active_experts,
        "num_experts": export.num_experts,
        "shared_size": export.shared_size,
        "text_tokens": text["training"]["tokens"],
        "commit": results["provenance"]["commit"],
        "near": near,
    }


def main() -> None:
    out, *runs = sys.argv[1:]
    rows = [row(name, Path(run)) for name, run in (each.split("=") for each in runs)]
    commits = ", ".join(dict.fromkeys(each["commit"] for each in rows))
    said = {"origin": "measured", "rows": rows}
    write_json(Path(out), said | {"provenance": provenance(0) | {"commit": commits}})


if __name__ == "__main__":
    main()
