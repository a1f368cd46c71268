"""Gather finished runs from one dense model into a result file, the README's table of it.

    python scripts/real_model_table.py results/smollm2.json RUN...

Each RUN is the folder of a `convert --repair` or a `finetune`. What `dotmoe evaluate` measured of
its export, or of the dense model with `--against`, counts where its `--out` is in the run folder.
"""

import json
import sys
from pathlib import Path
from typing import Any

from dotmoe.files import write_json
from dotmoe.provenance import provenance
from dotmoe.run_folder import RunFolder

STAGES = ("calibrate", "align", "extract", "repair", "finetune", "export")

Row = dict[str, Any]


def perplexity(measured: Row) -> Row:
    """By the name of the text."""
    name = Path(measured["text"][0]).name.partition(".")[0]
    return {"perplexity": {name: measured["perplexity"]}}


def rows_of(folder: Path) -> tuple[Row, list[Row]]:
    """The dense model, and what a run made of it, as rows."""
    results = json.loads((folder / "6_evaluate" / "results.json").read_text(encoding="utf-8"))
    split, config = results["granularity"], results["config"]
    width = split["num_experts"] * split["expert_size"] + split["shared_size"]
    active = split["active_experts"] * split["expert_size"] + split["shared_size"]
    made = {"model": "converted", "active_fraction": active / width}
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
    if "frozen" in results:
        rows.insert(0, made | {"training": "frozen", **perplexity(results["frozen"])})
    return {"model": "dense", **dense}, rows


def main() -> None:
    out, *folders = map(Path, sys.argv[1:])
    found = [rows_of(folder) for folder in folders]
    rows = [found[0][0], *(row for _, rows in found for row in rows)]
    commits = {
        json.loads((folder / "6_evaluate" / "results.json").read_text())["provenance"]["commit"]
        for folder in folders
    }
    write_json(out, {"rows": rows, "commits": sorted(commits), "provenance": provenance(0)})


if __name__ == "__main__":
    main()
