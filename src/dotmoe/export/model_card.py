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
    sections = [
        front_matter(record),
        _introduction(record),
        _sizes(record),
        _usage(record),
        _verification(record),
    ]
    if results:
        sections.append("## Results\n\n" + markdown_table(results))
    if record.notes:
        sections.append("## Notes\n\n" + "\n".join(f"- {note}" for note in record.notes))
    (folder / "README.md").write_text("\n\n".join(sections) + "\n")


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
    return (
        f"# {Path(record.source).name}, {record.active_experts} of {record.num_experts} experts\n\n"
        f"Made by `dotmoe` {record.dotmoe_version} from the dense model {origin}: in each of its "
        f"{record.num_layers} layers the FFN neurons are divided into {record.num_experts} experts "
        f"of {record.expert_size}, of which a learned router runs {record.active_experts} per "
        "token. Expert weights are the dense model's, unchanged. The terms of the dense model's "
        "licence apply."
    )


def _sizes(record: ExportRecord) -> str:
    rows: list[dict[str, str | int | float]] = [
        {"parameters": name.replace("_", " "), "count": count}
        for name, count in record.parameters.items()
    ]
    share = record.active_experts / record.num_experts
    return (
        "## Size\n\n"
        + markdown_table(rows)
        + f"\n\n{share:.1%} of the FFN neurons run per token. `active` counts everything that "
        "works on a token but the router rows; the experts that do not run are still stored. "
        f"Weights are {record.dtype}, {record.total_bytes:,} bytes."
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
        "```\n\n"
        f"```\nvllm serve {name}\n```"
    )
    if record.active_experts_editable:
        text += (
            f"\n\nTo run more or fewer experts, edit `{record.active_experts_key}` in "
            f"`config.json`: any number from 1 to {record.num_experts} is valid, and "
            f"{record.num_experts} gives back the dense model."
        )
    return text


def _verification(record: ExportRecord) -> str:
    check = record.verification
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
        "## Verification\n\n"
        f"Reloaded as `{check.loaded_class}` and compared on {check.tokens} tokens with float32 "
        "references; "
        "logit errors are in standard deviations of the logits.\n\n" + markdown_table(rows)
    )
