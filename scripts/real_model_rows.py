"""Add task scores to the rows of a comparison, as one result file.

    dotmoe compare GGUF OUT --methods dot_moe cmoe sparsegpt_2_4 ... --active-params 0.605 ...
    dotmoe evaluate OUT/ROW --tasks paper --shots 0 --limit 100 --out TASKS/ROW      # and dense
    python scripts/real_model_rows.py results/smollm2_rows.json OUT TASKS

A conversion's task scores belong to the weights that it exports. `made_at` lists the commits at
which rows were made: a comparison may be resumed at another commit.
"""

import sys
from pathlib import Path
from typing import Any

from dotmoe.common.files import read_json, write_json


def main_scores(folder: Path) -> dict[str, Any]:
    """Main scores of `dotmoe evaluate --tasks` by task; {} if it did not run."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        (main_score,) = (score for score in read_json(file)["scores"] if score["is_main"])
        kept = ("value", "stderr", "questions", "chance")
        found[file.stem] = {key: main_score[key] for key in kept}
    return found


def main() -> None:
    out, compared, tasks = map(Path, sys.argv[1:])
    record = read_json(compared / "compare.json")
    for row in record["rows"]:
        if row.get("weights") == "frozen" or row.get("router") == "own, not exportable":
            continue
        if scores := main_scores(tasks / row["run"] / "tasks"):
            row["tasks"] = scores
    record["model"] = Path(record["model"]).name
    runs = (read_json(compared / row["run"] / "manifest.json") for row in record["rows"][1:])
    made = (stage["provenance"]["commit"] for run in runs for stage in run["stages"].values())
    record["made_at"] = list(dict.fromkeys(made))
    write_json(out, record)


if __name__ == "__main__":
    main()
