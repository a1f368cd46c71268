"""Collect finished runs of one dense model into a result file.

    python scripts/real_model.py table results/smollm2.json DENSE RUN...
    python scripts/real_model.py rows results/smollm2_rows.json COMPARED TASKS [NAME=RUN...]
    python scripts/real_model.py conversions results/first_contact.json RUN...

`table`: the README's table. Each RUN is the folder of a `convert --repair` or a `finetune`. Results
of `dotmoe evaluate` on it, or with `--against` on the dense model, count if their `--out` is in the
run folder; for tasks, if it is the run folder itself, or DENSE. RUN/bench.json is the output of
`dotmoe bench --json` for its GGUF file and the dense one.

`rows`: the rows of a comparison, with what `dotmoe evaluate COMPARED/ROW --out TASKS/ROW` found
added: scores of `--tasks`, and losses on further texts by the name of their folder, as of
TASKS/ROW/books. Each RUN beside, made of the same model, is a row of that NAME; its texts are in
TASKS/RUN. COMPARED may be an earlier file of these rows. `made_at` lists all rows' commits.

`conversions`: what `convert` chose for each RUN, the time of its stages beside the plan, and its
perplexities on its own held-out text and on texts evaluated with `--against` into RUN. The plan,
RUN/plan.json, is the output of `dotmoe inspect --json` with the same options on the same machine.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dotmoe.common.files import read_json, write_json
from dotmoe.export.record import ExportRecord
from dotmoe.measure.evaluate.difference import difference
from dotmoe.models.load import describe_dense
from dotmoe.pipeline.compare import text_tokens
from dotmoe.run.config import RunConfig
from dotmoe.run.folder import RunFolder
from dotmoe.run.provenance import provenance

STAGES = ("calibrate", "align", "extract", "repair", "finetune", "export")

Row = dict[str, Any]


def main_scores(folder: Path) -> Row:
    """Main scores of `dotmoe evaluate --tasks` by task; {} if it did not run."""
    found = {}
    for file in sorted(folder.glob("tasks/*.json")):
        (found[file.stem],) = (score for score in read_json(file)["scores"] if score["is_main"])
    return found


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
        tokens, training = results["tokens"], "repaired, finetuned"
    dense, last = perplexity(results["dense"]), perplexity(results["moe"])
    for file in folder.glob("*/perplexity.json"):
        found = read_json(file)
        last["perplexity"] |= perplexity(found.get("model", found))["perplexity"]
        if "against" in found:
            dense["perplexity"] |= perplexity(found["against"])["perplexity"]
    last |= {"training_tokens": tokens, "seconds": RunFolder(folder).seconds(*STAGES)}
    last["tasks"] = main_scores(folder)
    if (file := folder / "bench.json").exists():
        (point,) = read_json(file)["points"]
        for row, side in ((dense, "dense"), (last, "moe")):
            row["decode_tokens_per_s"] = point[side]["tokens_per_s"]
    rows = [made | {"training": training, **last}]
    if "frozen" in results and training == "repaired":
        rows.insert(0, made | {"training": "frozen", **perplexity(results["frozen"])})
    return dense, rows


def table(dense_folder: str, *folders: str) -> Row:
    """The dense model, and each run as split, repaired and finetuned."""
    rows: list[Row] = [{"model": "dense", "tasks": main_scores(Path(dense_folder))}]
    commits = dict[str, None]()  # in the order of the rows
    for folder in map(Path, folders):
        results = read_json(folder / "6_evaluate" / "results.json")
        commits[results["provenance"]["commit"]] = None
        dense, made = rows_of(folder, results)
        dense["perplexity"] = rows[0].get("perplexity", {}) | dense["perplexity"]
        rows[0] |= dense
        rows += made
    return {"rows": rows, "provenance": provenance(0) | {"commit": ", ".join(commits)}}


def row_beside(name: str, folder: Path) -> Row:
    """The row of a conversion or finetuning that is in no comparison: that of its export."""
    manifest, row = read_json(folder / "manifest.json"), Row(value=name)
    if "row" in manifest:  # of a script that has left the tree
        return {**manifest["row"], **row}
    results = read_json(folder / "6_evaluate" / "results.json")
    if results["config"]["command"] == "finetune":
        row = row_beside(name, Path(results["config"]["run"]))
        row |= {"weights": "finetuned", "text_tokens": row["text_tokens"] + results["tokens"]}
    else:
        row["router"] = "own"
        row["weights"] = "repaired" if "repair" in results else "aligned"
        config = RunFolder(folder).config(RunConfig)
        read = text_tokens(config, results["steps"], describe_dense(config.model))
        row["text_tokens"] = read + results.get("repair", {}).get("tokens", 0)
    row |= {each: results["moe"][each] for each in ("perplexity", "loss", "window_losses")}
    row |= {"run": str(folder), "loss_above_dense": difference(results["moe"], results["dense"])[0]}
    return row | {"active_fraction": ExportRecord.load(folder / "5_export").active_fraction}


def rows(compared: str, tasks: str, *beside: str) -> Row:
    """The record of a comparison, or one made before, and of runs beside it, with task scores."""
    before = Path(compared)
    record = read_json(before if before.is_file() else before / "compare.json")
    folders = [before / row["run"] for row in record["rows"][1:] if before.is_dir()]
    for name, _, folder in (each.partition("=") for each in beside):
        record["rows"].append(row_beside(name, Path(folder)))
        folders.append(Path(folder))
    for row in record["rows"]:
        if row.get("weights") == "frozen" or row.get("router") == "own, not exportable":
            continue
        row["tasks"] = row.get("tasks") or main_scores(Path(tasks) / row["run"])
        for file in Path(tasks, row["run"]).glob("*/perplexity.json"):
            found = read_json(file)
            row.setdefault("texts", {})[file.parent.name] = found.get("model", found)
    record["model"] = Path(record["model"]).name
    runs = (read_json(folder / "manifest.json") for folder in folders)
    made = (stage["provenance"]["commit"] for run in runs for stage in run["stages"].values())
    return {**record, "made_at": list(dict.fromkeys([*record.get("made_at", ()), *made]))}


def conversions(*folders: str) -> Row:
    """A row for each conversion: its choices, time, plan, and perplexities beside dense."""
    rows = []
    for folder in map(Path, folders):
        results = read_json(folder / "6_evaluate" / "results.json")
        measured = [(results["dense"], results["moe"])]
        for found in map(read_json, sorted(folder.glob("*/perplexity.json"))):
            measured.append((found["against"], found["model"]))
        texts = {}
        for dense, made in measured:
            above, stderr = difference(made, dense)
            texts[Path(dense["text"][0]).name.partition(".")[0]] = {
                "dense": dense["perplexity"],
                "converted": made["perplexity"],
                "times_dense": math.exp(above),
                "nats_above_dense": above,
                "stderr": stderr,
                "windows": len(dense["window_losses"]),
            }
        plans = read_json(folder / "plan.json")["conversions"]
        (plan,) = (each for each in plans if each["gpu"] == "this CPU")
        seconds = {n: s["seconds"] for n, s in RunFolder(folder).manifest["stages"].items()}
        rows.append(
            {
                "model": f"{Path(results['config']['model']).name}, dequantised",
                "time": results["config"]["time"],
                "chosen": results["granularity"],
                "repair_tokens": results["repair"]["tokens"],
                "repair_epochs": results["config"]["repairing"]["repair_epochs"],
                "planned_seconds": {each["stage"]: 3600 * each["hours"] for each in plan["stages"]},
                "seconds": seconds,
                "planned": 3600 * plan["hours"],
                "total": sum(seconds.values()),
                "before_repair": results["frozen"]["perplexity"],
                "texts": texts,
                "made": results["provenance"],
            }
        )
    commits = dict.fromkeys(row["made"]["commit"] for row in rows)
    return {"rows": rows, "provenance": provenance(0) | {"commit": ", ".join(commits)}}


if __name__ == "__main__":
    what, out, *given = sys.argv[1:]
    collect: list[Callable[..., Row]] = [table, rows, conversions]
    write_json(Path(out), {each.__name__: each for each in collect}[what](*given))
