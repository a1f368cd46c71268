"""An inspection as tables for a terminal of 80 columns or more."""

from dotmoe.common.files import Values
from dotmoe.common.tables import Table, in_about, in_time, table_of
from dotmoe.method.granularity import Granularity, from_record


def tables_of(record: Values) -> list[Table]:
    """Tables of a record of `inspect_model`: the conversion, its cost, and warnings."""
    tables = [_model(record), counts_table(record["counts"])]
    first, *others = record["conversions"]
    if first["origin"] != "measured":
        tables += [_stages(record, each) for each in (first, *others)]
    else:
        tables += [_stages(record, first), _conversions(others)]
    tables += [_choices(record)] if record["choices"] else []
    for task in record["run"]["shown"]:
        tables.append(_plans(record["run"], [p for p in record["plans"] if p["task"] == task]))
    rows = [["answers:", sentence] for sentence in _written(record["run"])]
    rows += [["convert:", sentence] for sentence in record["chosen"]]
    rows += [["warning:", warning] for warning in record["warnings"]]
    rows += [["serving:", limit] for limit in record["limits"]]
    rows += [["estimate:", sentence] for sentence in record["unmeasured"]]
    tables.append(Table(columns=("", ""), rows=rows, words=2))
    return tables


def _model(record: Values) -> Table:
    splits = from_record(record["granularity"])
    widths = record["widths"]
    model = (
        f"{record['model_type']}, {widths['layers']} layers, model width {widths['model']:,}, FFN "
        f"width {widths['ffn']:,}, vocabulary {widths['vocabulary']:,}, "
        f"context {widths['context']:,}, stored as {record['stored_dtype']}"
    )
    rows = [["split", in_words(split, widths["layers"])] for split in splits]
    return Table(columns=("", ""), rows=[["model", model], *rows], words=2)


def in_words(split: Granularity, layers: int) -> str:
    """The experts of a split of a model with so many layers, and what of them runs for a token."""
    units, whole = "neurons", "FFN neurons"
    if split.target == "attention":
        units, whole = "query heads", "query heads; all keys and values"
    first = split.first_dense_layers
    which = f"layers {first} to {layers - 1}: " if first else "every layer "
    shared = f"and {split.shared_size} neurons always, " if split.shared_size else ""
    return (
        f"{which}{split.num_experts} experts of {split.expert_size} {units}; "
        f"{split.active_experts} run per token, {shared}{split.active_fraction:.1%} of the {whole}"
    )


def counts_table(counts: Values, title: str = "") -> Table:
    """Table of the `ParameterCounts` given; each weight counts once, however often it is stored."""
    whole = " (whole)" if counts.get("heads_total") else ""
    is_tied = counts.get("output_head") == 0
    names = {
        "dense_total": "dense model",
        "stored": "dense model and routers",
        "written": "  in the files of the export",
        "active": "active per token",
        "active_with_routers": "  with routers",
        "active_without_embeddings": "  without embeddings and head",
        "floor": "outside what is split: always active",
        "attention_and_norms": f"  attention{whole} and norms",
        "input_embedding": "  input embedding",
        "output_head": "  output head (tied)" if is_tied else "  output head",
    }
    return table_of(
        [name for name in names if name in counts],
        {
            "parameters (exact)": lambda key: names[key],
            "count": lambda key: f"{counts[key]:,}",
            "of dense": lambda key: f"{counts[key] / counts['dense_total']:.1%}",
        },
        title=title,
    )


def _stages(record: Values, conversion: Values) -> Table:
    """Memory, time and disk of each stage of the conversion on one machine."""
    rows = [
        [
            row["stage"],
            _memory(row),
            _hours(row["hours"]),
            in_about(row["disk"]),
        ]
        for row in conversion["stages"]
    ]
    run = record["run"]
    total = in_about(record["disk_total"])
    rows.append(["all, with the dense model", "", _hours(conversion["hours"]), total])
    tokens = (
        f"text {run['text_tokens']:,}, start {run['calibration_tokens']:,}, "
        f"repair {run['repair_tokens']:,} tokens"
    )
    return Table(
        title=f"dotmoe convert on {_machine(conversion)} (estimated; {tokens})",
        columns=("stage", "memory", "time", "disk"),
        rows=rows,
        note="--json lists the operations of each stage and the items of each size.",
    )


def _written(run: Values) -> list[str]:
    """What the dense model itself writes."""
    parts = [f"{each['texts']:,} {each['what']} ({each['tokens']:,})" for each in run["writing"]]
    if not parts:
        return []
    tokens = sum(each["tokens"] for each in run["writing"])
    return [f"the model writes about {tokens:,} tokens: {', '.join(parts)}"]


def _memory(row: Values) -> str:
    """The memory of a stage, and whether the device has less."""
    needed = in_about(row["memory_total"])
    return needed if row["fits"] else f"{needed} (too much)"


def _conversions(conversions: list[Values]) -> Table:
    """Time of the longest stages, and of all, on each machine."""
    names = {
        "answers": "answers",
        "start from data": "start",
        "alignment": "alignment",
        "repair": "repair",
    }
    rows = []
    for each in conversions:
        hours = {row["stage"]: _hours(row["hours"]) for row in each["stages"]}
        most = max(row["memory_total"] for row in each["stages"])
        memory = in_about(most) if each["fits"] else "does not fit"
        times = [hours.get(name, "-") for name in names]
        rows.append([_machine(each), memory, *times, _hours(each["hours"])])
    return Table(
        title="dotmoe convert on other machines (estimated, never measured on a GPU)",
        columns=("on", "memory", *names.values(), "all"),
        rows=rows,
    )


def _choices(record: Values) -> Table:
    """Repairs to choose from on the first machine, and a finetuning."""
    return Table(
        title=f"choices on {_machine(record['conversions'][0])}",
        columns=("dotmoe", "time"),
        rows=[[each["command"], _hours(each["hours"])] for each in record["choices"]],
    )


def _hours(hours: float | None) -> str:
    """An estimated time, no finer than a minute."""
    if hours is None:
        return "-"
    if hours < 1 / 60:
        return "under 1 min"
    return f"{60 * hours:.0f} min" if hours < 1 else in_time(hours)


def _plans(run: Values, plans: list[Values]) -> Table:
    """The recommended way to run on each machine, its speed and how long it takes."""
    rows = []
    for plan in plans:
        way = plan["recommended"]
        if way is None:
            rows.append([_machine(plan), "does not fit", "", "", "", "", ""])
            continue
        memory = in_about(way["memory_total"])
        if way["on_host"]:
            memory += f", host {in_about(way['on_host'])}"
        rows.append(
            [
                _machine(plan),
                way["way"],
                str(way["micro_batch_size"]),
                memory,
                f"{way['tokens_per_s']:,.0f}",
                in_time(plan["hours"]),
                f"{plan['gpu_hours']:,.0f}",
            ]
        )
    task = plans[0]["task"]
    name = "alignment" if task == "align" else "optional finetuning"
    return Table(
        title=f"{name} of {run['tokens'][task]:,} tokens (estimated; GPUs at "
        "assumed shares of the rates that vendors quote, not measured)",
        columns=("on", "weights", "at once", "memory", "tokens/s", "time", "GPU h"),
        rows=rows,
        note="--json lists all ways that were compared, with memory by item and time by part.",
    )


def _machine(plan: Values) -> str:
    """`8 x H100`, or this machine."""
    if plan["origin"] == "measured":
        return str(plan["gpu"])
    return f"{plan['gpus']} x {plan['gpu'].split()[0]}"
