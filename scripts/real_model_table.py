"""Collect finished runs of one dense model into the result file of the README's table.

    python scripts/real_model_table.py results/smollm2.json DENSE RUN...

Each RUN is the folder of a `convert --repair` or a `finetune`. Results of `dotmoe evaluate` on its
export, or on the dense model with `--against`, count if their `--out` is in the run folder; for
tasks, if it is the run folder itself, or DENSE. RUN/bench.json is the output of `dotmoe bench
--json` for its GGUF file and the dense one.
"""

import sys
from pathlib import Path
from typing import Any

from dotmoe.common.files import read_json, write_json
from dotmoe.export.record import ExportRecord
from dotmoe.run.folder import RunFolder, provenance
from real_model_rows import main_scores

STAGES = ("calibrate", "align", "extract", "repair", "finetune", "export")

Row = dict[str, Any]


def perplexity(measured: Row) -> Row:
    """Perplexity, keyed by the name of the text."""
    name = Path(measured["text"][0]).name.partition(".")[0]
    return {"perplexity": {name: measured["perplexity"]}}


def rows_of(folder: Path, results: Row) -> tuple[Row, list[Row]]:
    """Dense row from a run's files, and the rows of the models made from it."""
    export, config = ExportRecord.load(folder / "5_export"), results["config"]
    split_share = 1 - export.first_dense_layers / export.num_layers
    active = 1 - split_share * (1 - export.active_fraction)
    made = {"model": "converted", "active_fraction": active}
    tokens, training = results.get("repair", {}).get("tokens", 0), "repaired"
    if config["command"] == "finetune":
        training = "repaired, finetuned"
        tokens = results["tokens"]
    dense, last = perplexity(results["dense"]), perplexity(results["moe"])
    for file in folder.glob("*/perplexity.json"):
        found = read_json(file)
        last["perplexity"] |= perplexity(found.get("model", found))["perplexity"]
        if "against" in found:
            dense["perplexity"] |= perplexity(found["against"])["perplexity"]
    last |= {"training_tokens": tokens, "seconds": RunFolder(folder).seconds(*STAGES)}
    if scores := main_scores(folder / "tasks"):
        last["tasks"] = scores
    if (file := folder / "bench.json").exists():
        (point,) = read_json(file)["points"]
        for row, side in ((dense, "dense"), (last, "moe")):
            row["decode_tokens_per_s"] = point[side]["tokens_per_s"]
    rows = [made | {"training": training, **last}]
    if "frozen" in results and training == "repaired":
        rows.insert(0, made | {"training": "frozen", **perplexity(results["frozen"])})
    return dense, rows


def main() -> None:
    out, dense_folder, *folders = map(Path, sys.argv[1:])
    rows: list[Row] = [{"model": "dense", "tasks": main_scores(dense_folder / "tasks")}]
    commits = dict[str, None]()  # in the order of the rows
    for folder in folders:
        results = read_json(folder / "6_evaluate" / "results.json")
        commits[results["provenance"]["commit"]] = None
        dense, made = rows_of(folder, results)
        dense["perplexity"] = rows[0].get("perplexity", {}) | dense["perplexity"]
        rows[0] |= dense
        rows += made
    write_json(out, {"rows": rows, "provenance": provenance(0) | {"commit": ", ".join(commits)}})


if __name__ == "__main__":
    main()
