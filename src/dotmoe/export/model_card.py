"""README.md of an exported folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dotmoe.export.record import ExportRecord

Row = Mapping[str, str | int | float]


def write_model_card(folder: Path, record: ExportRecord, results: Sequence[Row] = ()) -> None:
    """Write `README.md`; call it again with results once the exported model has been evaluated.

    Args:
        folder: The exported folder.
        record: What was exported.
        results: Rows of a table, all with the same columns; none: no table.
    """
    (folder / "README.md").write_text(card_text(record, results), encoding="utf-8")


def card_text(record: ExportRecord, results: Sequence[Row] = ()) -> str:
    """The content of `README.md`; arguments as for `write_model_card`."""
    sections = [
        front_matter(record),
        _introduction(record),
        _sizes(record),
        _usage(record),
        _verification(record),
        _routing(record),
    ]
    if results:
        sections.append("## Results\n\n" + markdown_table(results))
    if record.notes:
        sections.append("## Notes\n\n" + "\n".join(f"- {note}" for note in record.notes))
    return "\n\n".join(sections) + "\n"


def front_matter(record: ExportRecord) -> str:
    """YAML head of the card. A JSON string is a YAML string, so quoting is JSON's.

    `base_model` must be a hub name; it is left out for a local folder.
    """
    lines = ["---"]
    if record.revision is not None:
        lines.append(f"base_model: {json.dumps(record.source)}")
        lines.append("base_model_relation: finetune")
    lines += [
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        *(f"- {tag}" for tag in ("dotmoe", "mixture-of-experts", "moe", record.format)),
        "---",
    ]
    return "\n".join(lines)


def markdown_table(rows: Sequence[Row]) -> str:
    """A Markdown table of equal dicts.

    Example:
        >>> print(markdown_table([{"k": 4, "perplexity": 12.3456}]))
        | k | perplexity |
        |---|---|
        | 4 | 12.35 |
    """
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row[name]) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: str | int | float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    text = f"{value:.4g}" if isinstance(value, float) else value
    return text.replace("|", "\\|").replace("\n", " ")


def _introduction(record: ExportRecord) -> str:
    origin = record.source + (f" at revision {record.revision}" if record.revision else "")
    first = record.first_dense_layers
    split = f"{record.num_layers - first} of its" if first else "each of its"
    shared = f" Besides, {record.shared_size} neurons always run." if record.shared_size else ""
    return (
        f"# {Path(record.source).name}, {record.active_experts} of {record.num_experts} experts\n\n"
        f"Made by `dotmoe` {record.dotmoe_version} from the dense model {origin}: in "
        f"{split} {record.num_layers} layers the FFN neurons are divided into "
        f"{record.num_experts} experts of {record.expert_size}, of which a learned router runs "
        f"{record.active_experts} per token.{shared} Beside the dense model: {record.exactness}. "
        "The terms of its licence apply."
    )


def _sizes(record: ExportRecord) -> str:
    rows: list[dict[str, str | int | float]] = [
        {"parameters": name.replace("_", " "), "count": count}
        for name, count in record.parameters.items()
    ]
    where = " of a split layer" if record.first_dense_layers else ""
    return (
        "## Size\n\n"
        + markdown_table(rows)
        + f"\n\n{record.active_fraction:.1%} of the FFN neurons{where} run per token. `active` "
        "counts everything that works on a token but the router rows; the experts that do not run "
        f"are still stored. Weights are {record.dtype}, {record.total_bytes:,} bytes."
    )


def _usage(record: ExportRecord) -> str:
    name = record.name
    text = (
        "## Use\n\n"
        f"An ordinary `{record.format}` checkpoint; no code besides the runtime's is needed.\n\n"
        "```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"model = AutoModelForCausalLM.from_pretrained({json.dumps(name)})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(name)})\n"
        "```"
    )
    if "vLLM" in record.servers:
        text += f"\n\n```\nvllm serve {name}\n```"
    if record.active_experts_editable:
        text += (
            f"\n\nAny number of experts from 1 to {record.num_experts} may run, and "
            f"{record.num_experts} give back the dense model. "
            f"`dotmoe edit {name} --active-experts K` changes it for every runtime, with this card "
            f"and `dotmoe.json`. For one model in memory, give `from_pretrained` the keyword "
            f"`{record.active_experts_key}=K`."
        )
    return text


def _verification(record: ExportRecord) -> str:
    check = record.verification
    warning = f"**Unverified: {record.problem}**\n\n" if record.problem else ""
    if check is None:
        return f"## Verification\n\n{warning}".rstrip()
    layers = check.layers
    rows: list[dict[str, Any]] = [
        {
            "comparison": "worst median relative error of a block",
            "value": max(layer.block_error for layer in layers),
        },
        {
            "comparison": "worst share of misrouted tokens in a layer",
            "value": max(layer.misrouted for layer in layers),
        },
        {
            "comparison": "mean logit error against the masked dense model",
            "value": check.logits_error,
        },
        {"comparison": "share of tokens with the same top token", "value": check.top1_agreement},
        {
            "comparison": "the same where each model routes for itself",
            "value": check.own_routes_top1_agreement,
        },
    ]
    if check.dense_error is not None:
        rows.append(
            {
                "comparison": "mean logit error against the dense model, all experts on",
                "value": check.dense_error,
            }
        )
    if check.dtype != "float32":
        rows.append(
            {
                "comparison": f"mean logit error of the masked dense model itself in {check.dtype}",
                "value": check.logits_floor,
            }
        )
    return (
        f"## Verification\n\n{warning}"
        f"Reloaded as `{check.loaded_class}` and compared on {check.tokens} tokens with float32 "
        f"references at k = {record.verified_active_experts}; logit errors are in standard "
        "deviations of the logits.\n\n" + markdown_table(rows)
    )


def _routing(record: ExportRecord) -> str:
    """The worst layer of each runtime."""
    rows = [
        {
            "router as in": groups[0].runtime,
            "misrouted tokens": f"{max(each.misrouted for each in groups):.2%}",
            "tied by rounding": f"{max(each.tied for each in groups):.2%}",
            "gate deviation (95 % of tokens)": max(each.gate_deviation for each in groups),
            "of the worst token": max(each.largest_gate_deviation for each in groups),
            "mean gain error": max((each.gain_error for each in groups), key=abs),
        }
        for groups in zip(*(router.runtimes for router in record.routers), strict=True)
    ]
    misrouted = max(router.expected_misrouted for router in record.routers)
    deviation = max(router.expected_gate_deviation for router in record.routers)
    return (
        "## Routing in other runtimes\n\n"
        "Routers are written as 2^-p W_r, so that the weights of the chosen experts are all but "
        "equal. What runtimes make of that was emulated on calibration text; figures are those of "
        f"the worst layer. By the rule for p, {misrouted:.2%} misrouted tokens in the weakest "
        f"runtime and a typical gate deviation of {deviation:.1g} were to be expected.\n\n"
        + markdown_table(rows)
    )
