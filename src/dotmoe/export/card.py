"""README.md of an exported folder."""

import json
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import ModelCardData

from dotmoe.export.gguf_record import GgufVerification
from dotmoe.export.record import ExportRecord
from dotmoe.export.verify import Verification
from dotmoe.tables import Table, figure, percent, table_of, to_markdown

CARD_FILE = "README.md"
_FOLDER = "path/to/this/folder"


def write_model_card(folder: Path, record: ExportRecord, results: Table | None = None) -> None:
    """Write `README.md`; call it again with results once the exported model has been evaluated."""
    (folder / CARD_FILE).write_text(card_text(record, results), encoding="utf-8")


def card_text(record: ExportRecord, results: Table | None = None) -> str:
    """The content of `README.md`."""
    sections = [_front_matter(record), _introduction(record), _sizes(record), _usage(record)]
    sections += [_verification(record), _routing(record)]
    if results is not None:
        sections.append("## Results\n\n" + to_markdown(results))
    if record.notes:
        sections.append("## Notes\n\n" + "\n".join(f"- {note}" for note in record.notes))
    return "\n\n".join(filter(None, sections)) + "\n"


def _figures(what: str, unit: str, values: Mapping[str, int | float]) -> str:
    columns = {what: lambda item: item[0], unit: lambda item: figure(item[1])}
    return to_markdown(table_of(values.items(), columns))


def _front_matter(record: ExportRecord) -> str:
    """YAML head of the card. `base_model` must be a hub name, so a local folder is left out."""
    is_gguf = "arch" in record.details
    kind = ["mixture-of-experts", "moe"] if record.num_experts else []
    data = ModelCardData(
        base_model=record.source if record.revision is not None else None,
        base_model_relation=None
        if record.revision is None
        else ("quantized" if is_gguf else "finetune"),
        library_name="gguf" if is_gguf else "transformers",
        pipeline_tag="text-generation",
        tags=["dotmoe", *kind, "gguf" if is_gguf else record.format],
    )
    return f"---\n{data.to_yaml()}\n---"


def _introduction(record: ExportRecord) -> str:
    origin = record.source + (f" at revision {record.revision}" if record.revision else "")
    title = Path(record.source).name
    made = f"Made by `dotmoe` {record.dotmoe_version} from the dense model {origin}"
    if not record.num_experts:
        return (
            f"# {title}, GGUF {record.dtype}\n\n{made}, not split. The terms of its licence apply."
        )
    first = record.first_dense_layers
    split = f"{record.num_layers - first} of its" if first else "each of its"
    shared = f" Besides, {record.shared_size} neurons always run." if record.shared_size else ""
    return (
        f"# {title}, {record.active_experts} of {record.num_experts} experts\n\n{made}: in "
        f"{split} {record.num_layers} layers the FFN neurons are divided into "
        f"{record.num_experts} experts of {record.expert_size}, of which a learned router runs "
        f"{record.active_experts} per token.{shared} Beside the dense model: {record.exactness}. "
        "The terms of its licence apply."
    )


def _sizes(record: ExportRecord) -> str:
    counts = {name.replace("_", " "): count for name, count in record.parameters.items()}
    table = _figures("parameters", "count", counts)
    where = " of a split layer" if record.first_dense_layers else ""
    weights = f"Weights are {record.dtype}, {record.total_bytes:,} bytes."
    if not record.num_experts:
        return f"## Size\n\n{table}\n\n{weights}"
    return (
        "## Size\n\n"
        + table
        + f"\n\n{record.active_fraction:.1%} of the FFN neurons{where} run per token. `active` "
        "counts everything that works on a token but the router rows; the experts that do not run "
        f"are still stored. {weights}"
    )


def _usage(record: ExportRecord) -> str:
    if "arch" in record.details:
        return _gguf_usage(record)
    folder = json.dumps(_FOLDER)
    text = (
        "## Use\n\n"
        f"An ordinary `{record.format}` checkpoint; no code besides the runtime's is needed.\n\n"
        "```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"model = AutoModelForCausalLM.from_pretrained({folder})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({folder})\n"
        "```"
    )
    if "vLLM" in record.servers:
        text += f"\n\n```\nvllm serve {_FOLDER} --dtype {record.dtype}\n```"
    if record.active_experts_editable:
        text += (
            f"\n\nAny number of experts from 1 to {record.num_experts} may run, and "
            f"{record.num_experts} give back the dense model. "
            f"`dotmoe edit {_FOLDER} --active-experts K` changes it for every runtime, with this "
            "card and `dotmoe.json`. For one model in memory, give `from_pretrained` the keyword "
            f"`{record.active_experts_key}=K`."
        )
    return text


def _gguf_usage(record: ExportRecord) -> str:
    details, (file,) = record.details, record.files
    text = (
        f"## Use\n\nA file of llama.cpp's architecture `{details['arch']}`, for texts of up to "
        f"{details['context']} tokens; tokenizer {details['tokenizer']}.\n\n"
        f"```\nllama-server -m {file} -c {details['context']}\n```"
    )
    if record.active_experts_editable:
        text += (
            f"\n\n`dotmoe edit {_FOLDER} --active-experts K` changes the number of experts that "
            f"run, 1 to {record.num_experts}; the last gives back the dense model. No metadata key "
            "alone does, as the weights of the experts go with it."
        )
    return text


def _verification(record: ExportRecord) -> str:
    warning = "".join(f"**Unverified.** {problem}\n\n" for problem in record.problems)
    check = record.verification
    if check is None:
        return f"## Verification\n\n{warning}".rstrip()
    if isinstance(check, GgufVerification):
        return f"## Verification\n\n{warning}{_gguf_verification(check)}"
    return (
        f"## Verification\n\n{warning}"
        f"Reloaded as `{check.loaded_class}` and compared in float32 on {check.tokens} tokens at "
        f"k = {record.verified_active_experts}; logit errors are medians over tokens, in standard "
        "deviations of the logits.\n\n" + _figures("comparison", "value", _compared(check))
    )


def _gguf_verification(check: GgufVerification) -> str:
    values = {f"largest relative error of {check.tensors} tensors read back": check.storing_error}
    text, run = "Not run in llama.cpp: llama-cpp-python was not installed.", check.run
    if run is not None:
        text = (
            f"Run in llama-cpp-python {run.runtime} on {run.tokens} tokens beside float32 "
            "Transformers with the weights as stored; logit errors are medians over tokens, in "
            "standard deviations of the logits."
        )
        values |= {
            "logit error against the masked dense model": run.logits_error,
            "share of tokens with the same top token": run.top1_agreement,
        }
        if run.all_experts_error is not None:
            values["logit error against the dense model, all experts on"] = run.all_experts_error
    return f"{text}\n\n{_figures('comparison', 'value', values)}"


def _compared(check: Verification) -> dict[str, float]:
    layers = check.layers
    values = {
        "worst median relative error of a block": max(layer.block_error for layer in layers),
        "worst 95th percentile of it": max(layer.block_error_tail for layer in layers),
        "largest for an outlier token": max(layer.outlier_error for layer in layers),
        "largest share of outlier tokens": max(layer.outliers for layer in layers),
        "worst share of misrouted tokens in a layer": max(layer.misrouted for layer in layers),
        "logit error against the masked dense model": check.logits_error,
        "share of tokens with the same top token": check.top1_agreement,
        "logit error against the dense model, all experts on": check.dense_error,
    }
    return {name: value for name, value in values.items() if value is not None}


def _routing(record: ExportRecord) -> str:
    """The worst layer of each runtime."""
    if not record.routers:
        return ""
    columns = {
        "router as in": lambda rows: rows[0].runtime,
        "misrouted tokens": lambda rows: percent(max(row.misrouted for row in rows)),
        "tied by rounding": lambda rows: percent(max(row.tied for row in rows)),
        "gate deviation (95 % of tokens)": lambda rows: figure(
            max(row.gate_deviation for row in rows)
        ),
        "of the worst token": lambda rows: figure(max(row.largest_gate_deviation for row in rows)),
        "common factor, less 1": lambda rows: figure(
            max((row.gain_error for row in rows), key=abs)
        ),
    }
    layers = zip(*(router.runtimes for router in record.routers), strict=True)
    return (
        "## Routing in other runtimes\n\n"
        "Routers are written as 2^-p W_r, so that the weights of the chosen experts are all but "
        "equal. What runtimes make of that was imitated on calibration text; figures are those of "
        "the worst layer.\n\n" + to_markdown(table_of(layers, columns))
    )
