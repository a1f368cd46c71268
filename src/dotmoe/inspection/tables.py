"""An inspection as tables for a terminal of 80 columns or more."""

from rich.console import Group, RenderableType
from rich.text import Text

from dotmoe.files import Values
from dotmoe.granularity import Granularity, parts_of
from dotmoe.inspection.sizes import Items
from dotmoe.tables import Table, in_bytes, in_time, table_of, to_rich


def render(found: Values, *, details: bool = False) -> RenderableType:
    """What `inspect_model` found: what would be made of the model, its cost, and warnings.

    With `details` also the items that each size is the sum of, and all ways to run on GPUs.
    """
    before = [_model(found), counts_table(found["counts"]), _sizes(found, details)]
    if details:
        before += [_items(name.strip(), found[key]) for key, name in _sized(found["run"]).items()]
    after = [_plans(plans)] if (plans := found["plans"]) else []
    if details or len(plans) == 1:
        after += [table for plan in plans for table in _plan_details(plan)]
    if found["warnings"]:
        rows = [["warning:", warning] for warning in found["warnings"]]
        after.append(Table(columns=("", ""), rows=rows, words=2))
    return Group(*map(to_rich, before), Text(_here(found)), *map(to_rich, after))


def _model(found: Values) -> Table:
    parts, widths = parts_of(Granularity.of(found["granularity"])), found["widths"]
    first, layers = parts[0].first_dense_layers, widths["layers"]
    which = f"layers {first} to {layers - 1}: " if first else "every layer "
    model = (
        f"{found['model_type']}, {layers} layers, model width {widths['model']:,}, FFN width "
        f"{widths['ffn']:,}, vocabulary {widths['vocabulary']:,}, context {widths['context']:,}, "
        f"stored as {found['stored_dtype']}"
    )
    rows = [["model", model]]
    for part in parts:
        units, whole = "neurons", "FFN neurons"
        if part.target == "attention":
            units, whole = "query heads", "query heads; all keys and values"
        shared = f"and {part.shared_size} neurons always, " if part.shared_size else ""
        experts = (
            f"{which}{part.num_experts} experts of {part.expert_size} {units}; "
            f"{part.active_experts} run per token, {shared}"
            f"{part.active_fraction:.1%} of the {whole}"
        )
        rows.append(["split", experts])
    return Table(columns=("", ""), rows=rows, words=2)


def counts_table(counts: Values, title: str = "") -> Table:
    """Those of `ParameterCounts` that are there; each weight once, however often it is stored."""
    whole = " (whole)" if counts.get("heads_total") else ""
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
        "output_head": "  output head" + " (tied)" * (counts.get("output_head") == 0),
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


def _sized(run: Values) -> dict[str, str]:
    """What is a sum of items, by its key; what does not run is left out."""
    at_once = f"{run['micro_batch_size']} x {run['seq_len']:,} tokens at once"
    names = {
        "calibration_memory": "start from data" * (run["calibration_tokens"] > 0),
        "repair_memory": "repair",
        "memory": f"alignment, {at_once}" * (run["steps"] > 0),
        "memory_checkpointing": "  with --activation-checkpointing" * (run["steps"] > 0),
        "disk": "disk",
        "exported": "  exported checkpoint",
    }
    return {key: name for key, name in names.items() if name}


def _sizes(found: Values, details: bool) -> Table:
    run = found["run"]
    note = "" if details else "--details lists what each is the sum of."
    if run["device"] == "cpu" and run["bytes_per_weight"] == 4:
        note += " --bytes-per-weight 2 is for a GPU."
    title = f"memory and disk (estimated; weights in {run['bytes_per_weight']} bytes each)"
    shown = _sized(run)
    total = {"size": lambda key: in_bytes(found[f"{key}_total"])}
    return table_of(shown, {title: lambda key: shown[key], **total}, note=note)


def _here(found: Values) -> str:
    """The default recipe's repair and, where there are steps, an alignment on this machine."""
    run, here = found["run"], found["here"]
    lines = [
        f"on {here['name']}, {here['dtype']} (estimated; measured "
        f"{here['flops_per_s'] / 1e12:,.3g} TFLOP/s, {here['bytes_per_s'] / 1e9:,.3g} GB/s):",
        f"  repair, as by default: {run['repair_tokens']:,} tokens, {found['repair_flops']:.2e} "
        f"FLOP, most in float32: {in_time(here['hours_repair'])}",
    ]
    if run["steps"]:
        lines.append(
            f"  alignment, not by default: {run['steps']:,} steps of {run['batch_size']} x "
            f"{run['seq_len']:,} tokens, {found['flops']:.2e} FLOP: {in_time(here['hours'])}, "
            f"{in_time(here['hours_checkpointing'])} with checkpointing"
        )
    return "\n".join(lines) + "\n"


def _plans(plans: list[Values]) -> Table:
    """What is recommended on each machine, how fast that is and how long it takes."""
    first, rows = plans[0], []
    for plan in plans:
        if plan["recommended"]:
            hours = [in_time(plan["hours"]), f"{plan['gpu_hours']:,.0f}"]
            rows.append([_machine(plan), *_way(plan["recommended"]), *hours])
        else:
            needed = plan["gpus_needed"]
            said = f"needs {needed} GPUs" if needed else "does not fit"
            rows.append([_machine(plan), said, *[""] * 5])
    what = "alignment" if first["task"] == "align" else "fine-tuning"
    return Table(
        title=f"{what} of {first['tokens']:,} tokens on GPUs, weights in 2 bytes each (estimated "
        f"from {first['origin']} figures, of which shares are assumed, not measured)",
        columns=("GPUs", "weights", "at once", "memory", "tokens/s", "time", "GPU h"),
        rows=rows,
    )


def _plan_details(plan: Values) -> list[Table]:
    """All ways to run on one machine, and where memory and time of the recommended one go."""
    chosen, columns = plan["recommended"], ("at once", "memory", "tokens/s", "fits")
    shown = chosen or plan["choices"][-1]
    fits = {id(each): "yes" if each["fits"] else "no" for each in plan["choices"]}
    fits[id(chosen)] = "recommended"
    ways = [[*_way(each), fits[id(each)]] for each in plan["choices"]]
    step = {**shown["parts"], "step": shown["step_s"]}
    parts = [[part, f"{s:.4f}", f"{s / shown['step_s']:.1%}"] for part, s in step.items()]
    return [
        Table(columns=(f"{_machine(plan)}: ways", *columns), rows=ways),
        _items(f"memory of a GPU, {shown['way']}", shown["memory"]),
        Table(columns=("a step, part by part", "seconds", "share"), rows=parts),
    ]


def _way(choice: Values) -> list[str]:
    speed = f"{choice['tokens_per_s']:,.0f}"
    return [choice["way"], str(choice["micro_batch_size"]), in_bytes(choice["memory_total"]), speed]


def _machine(plan: Values) -> str:
    """`8 x H100`, or `2 x 8 x H100` on two nodes."""
    nodes = f"{plan['nodes']} x " if plan["nodes"] > 1 else ""
    return f"{nodes}{plan['gpus']} x {plan['gpu'].split()[0]}"


def _items(title: str, items: Items) -> Table:
    whole = {**items, "total": sum(items.values())}
    return table_of(whole, {title: str, "size": lambda name: in_bytes(whole[name])})
