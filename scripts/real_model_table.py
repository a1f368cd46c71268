"""Gather finished runs from one dense model into a result file, the README's table of it.

    python scripts/real_model_table.py results/smollm2.json RUN...

Each RUN is the folder of a `convert --repair` or a `finetune`. What `dotmoe evaluate` measured of
its export, or of the dense model with `--against`, counts where its `--out` is in the run folder.
"""

import json
import sys
from pathlib import Path
from typing import Any

from dotmoe.export.record import ExportRecord
from dotmoe.files import write_json
from dotmoe.provenance import provenance
from dotmoe.run_folder import RunFolder

STAGES = ("calibrate", "align", "extract", "repair", "finetune", "export")

Row = dict[str, Any]


def perplexity(measured: Row) -> Row:
    """By the name of the text."""
    name = Path(measured["text"][0]).name.partition(".")[0]
    return {"perplexity": {name: measured["perplexity"]}}


def rows_of(folder: Path, results: Row) -> tuple[Row, list[Row]]:
    """Perplexities of the dense model by text, and rows of what a run made of it."""
    export, config = ExportRecord.load(folder / "5_export"), results["config"]
    split_share = 1 - export.first_dense_layers / export.num_layers
    active = 1 - split_share * (1 - export.active_fraction)
    made = {"model": "converted", "active_fraction": active}
    tokens, training = results.get("repair", {}).get("tokens", 0), "repaired"
    if config["command"] == "finetune":
        training = "repaired, finetuned"
        tokens = results["steps"] * config["finetune"]["batch_size"] * config["data"]["seq_len"]
    dense, last = perplexity(results["dense"]), perplexity(results["moe"])
    for file in folder.glob("*/perplexity.json"):
        found = json.loads(file.read_text(encoding="utf-8"))
        last["perplexity"] |= perplexity(found.get("model", found))["perplexity"]
        if "against" in found:
            dense["perplexity"] |= perplexity(found["against"])["perplexity"]
    last |= {"training_tokens": tokens, "seconds": RunFolder(folder).seconds(*STAGES)}
    rows = [made | {"training": training, **last}]
    if "frozen" in results and training == "repaired":
        rows.insert(0, made | {"training": "frozen", **perplexity(results["frozen"])})
    return dense["perplexity"], rows


def main() -> None:
    out, *folders = map(Path, sys.argv[1:])
    rows: list[Row] = [{"model": "dense", "perplexity": {}}]
    commits = set()
    for folder in folders:
        results = json.loads((folder / "6_evaluate" / "results.json").read_text(encoding="utf-8"))
        commits.add(results["provenance"]["commit"])
        dense, made = rows_of(folder, results)
        rows[0]["perplexity"] |= dense
        rows += made
    write_json(out, {"rows": rows, "provenance": provenance(0) | {"commit": ", ".join(commits)}})


if __name__ == "__main__":
    main()
