"""README.md beside a GGUF."""

import json
from pathlib import Path

from dotmoe.export.card import Row, markdown_table
from dotmoe.gguf_export.record import GgufRecord


def write_card(folder: Path, record: GgufRecord) -> None:
    """Write `README.md` of an exported folder."""
    sections = [_front_matter(record), _introduction(record), _usage(record), _verification(record)]
    if record.notes:
        sections.append("## Notes\n\n" + "\n".join(f"- {note}" for note in record.notes))
    (folder / "README.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def _front_matter(record: GgufRecord) -> str:
    lines = ["---"]
    if record.revision is not None:
        lines += [f"base_model: {json.dumps(record.source)}", "base_model_relation: quantized"]
    tags = ["dotmoe", "gguf"] + ["mixture-of-experts", "moe"] * (record.num_experts is not None)
    lines += ["library_name: gguf", "pipeline_tag: text-generation", "tags:"]
    return "\n".join([*lines, *(f"- {tag}" for tag in tags), "---"])


def _introduction(record: GgufRecord) -> str:
    origin = record.source + (f" at revision {record.revision}" if record.revision else "")
    title = Path(record.source).name
    made = f"Made by `dotmoe` {record.dotmoe_version} from the dense model {origin}"
    licence = "The terms of the dense model's licence apply."
    if record.num_experts is None:
        return f"# {title}, GGUF {record.type}\n\n{made}, not split. {licence}"
    assert record.expert_size is not None
    shared = f" Besides, {record.shared_size} neurons are always on." if record.shared_size else ""
    return (
        f"# {title}, {record.active_experts} of {record.num_experts} experts, GGUF {record.type}\n"
        f"\n{made}: in each split layer the FFN neurons are divided into {record.num_experts} "
        f"experts of {record.expert_size}, of which a learned router runs {record.active_experts} "
        f"per token.{shared} Expert weights are the dense model's, stored as {record.type}. "
        f"{licence}"
    )


def _usage(record: GgufRecord) -> str:
    (file,) = record.files
    lines = [
        "## Use",
        f"A file of llama.cpp's architecture `{record.arch}`, for texts of up to {record.context} "
        f"tokens; tokenizer {record.tokenizer}; {record.total_bytes:,} bytes of weights.",
        f"```\nllama-server -m {file} -c {record.context}\n```",
    ]
    if record.num_experts is not None:
        lines.append(
            "More or fewer experts can be run: `dotmoe.gguf_export.set_active_experts` changes the "
            f"number in the file, 1 to {record.num_experts}; the last gives back the dense model. "
            "No metadata key alone does, as the weights of the experts go with it."
        )
    return "\n\n".join(lines)


def _verification(record: GgufRecord) -> str:
    check = record.verification
    rows: list[Row] = [
        {
            "comparison": f"largest relative error of {check.tensors} tensors read back",
            "value": check.storing_error,
        }
    ]
    if record.routers:
        deviation = max(router.gate_deviation for router in record.routers)
        misrouted = max(router.misrouted for router in record.routers)
        rows += [
            {"comparison": "largest difference of an expert's weight from 1", "value": deviation},
            {"comparison": "worst share of misrouted tokens in a layer", "value": misrouted},
        ]
    text = "## Verification"
    if check.run is None:
        text += "\n\nNot run in llama.cpp: llama-cpp-python was not installed."
    else:
        text += (
            f"\n\nRun in llama-cpp-python {check.run.runtime} on {check.run.tokens} tokens beside "
            "float32 Transformers; logit errors are in standard deviations of the logits."
        )
        rows += [
            {"comparison": "logit error of the median token", "value": check.run.logits_error},
            {"comparison": "same top token", "value": check.run.top1_agreement},
            {"comparison": "logit error of the storing alone", "value": check.run.weights_error},
        ]
    return f"{text}\n\n{markdown_table(rows)}"
