"""An inspection as tables for a terminal of 80 columns or more."""

from rich.console import Group, RenderableType
from rich.text import Text

from dotmoe.files import Values
from dotmoe.granularity import Granularity, parts_of
from dotmoe.inspection.sizes import Items
from dotmoe.tables import Table, in_bytes, in_time, table_of, to_rich


def render(found: Values, *, details: bool = False) -> RenderableType:
    """What `inspect_model` found: what would be made of the model, its cost, and warnings.

    With `details` also the items that each size is the sum of, and all ways to run.
    """
    run, plans = found["run"], found["plans"]
    before = [_model(found), counts_table(found["counts"]), _sizes(run, found, details)]
    if details:
        before += [_items(name.strip(), found[key]) for key, name in SIZES.items()]
    after = [_plans(run, plans)] if plans else []
    if details or len(plans) == 1:
        after += [table for plan in plans for table in _plan_details(plan)]
    if found["warnings"]:
        rows = [["warning:", warning] for warning in found["warnings"]]
        after.append(Table(columns=("", ""), rows=rows, words=2))
    return Group(*map(to_rich, before), Text(_repair(found)), *map(to_rich, after))


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


SIZES = {
    "calibration_memory": "start from data",
    "repair_memory": "repair",
    "disk": "disk",
    "exported": "  exported checkpoint",
}
"""What is a sum of items, by its key."""


def _sizes(run: Values, found: Values, details: bool) -> Table:
    title = f"memory and disk (estimated; weights in {run['bytes_per_weight']} bytes each)"
    note = "" if details else "--details lists what each is the sum of."
    total = {"size": lambda key: in_bytes(found[f"{key}_total"])}
    return table_of(SIZES, {title: lambda key: SIZES[key], **total}, note=note)


def _repair(found: Values) -> str:
    """The default recipe's repair on this machine."""
    here, tokens = found["here"], found["run"]["repair_tokens"]
    return (
        f"on {here['name']}, {here['dtype']} (estimated; measured "
        f"{here['flops_per_s'] / 1e12:,.3g} TFLOP/s, {here['bytes_per_s'] / 1e9:,.3g} GB/s):\n"
        f"  repair, as by default: {tokens:,} tokens, {found['repair_flops']:.2e} "
        f"FLOP, most in float32: {in_time(here['hours_repair'])}\n"
    )


def _plans(run: Values, plans: list[Values]) -> Table:
    """What is recommended on each machine, how fast that is and how long it takes."""
    rows = []
    for plan in plans:
        if plan["recommended"]:
            hours = [in_time(plan["hours"]), f"{plan['gpu_hours']:,.0f}"]
            rows.append([_machine(plan), *_way(plan["recommended"]), *hours])
        else:
            needed = plan["gpus_needed"]
            said = f"needs {needed} of them" if needed else "does not fit"
            rows.append([_machine(plan), said, *[""] * 5])
    what = {"align": "alignment, not by default,", "finetune": "fine-tuning"}[run["task"]]
    return Table(
        title=f"{what} of {run['tokens']:,} tokens (estimated; GPUs with weights in 2 bytes each, "
        "from quoted figures, of which shares are assumed, not measured)",
        columns=("on", "weights", "at once", "memory", "tokens/s", "time", "GPU h"),
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
    """`8 x H100`, or `2 x 8 x H100` on two nodes, or this machine."""
    if plan["origin"] == "measured":
        return str(plan["gpu"])
    nodes = f"{plan['nodes']} x " if plan["nodes"] > 1 else ""
    return f"{nodes}{plan['gpus']} x {plan['gpu'].split()[0]}"


def _items(title: str, items: Items) -> Table:
    whole = {**items, "total": sum(items.values())}
    return table_of(whole, {title: str, "size": lambda name: in_bytes(whole[name])})
