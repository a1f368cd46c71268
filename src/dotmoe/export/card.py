"""README.md of an exported folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import ModelCardData

from dotmoe.export.gguf_record import GgufVerification
from dotmoe.export.record import ExportRecord
from dotmoe.export.verify import Verification
from dotmoe.tables import Table, figure, percent, to_markdown

CARD_FILE = "README.md"
_FOLDER = "path/to/this/folder"

Row = Mapping[str, str | int | float]


def write_model_card(folder: Path, record: ExportRecord, results: Sequence[Row] = ()) -> None:
    """Write `README.md`; call it again with results once the exported model has been evaluated.

    Args:
        folder: The exported folder.
        record: What was exported.
        results: Rows of a table, all with the same columns; none: no table.
    """
    (folder / CARD_FILE).write_text(card_text(record, results), encoding="utf-8")


def card_text(record: ExportRecord, results: Sequence[Row] = ()) -> str:
    """The content of `README.md`; arguments as for `write_model_card`."""
    sections = [_front_matter(record), _introduction(record), _sizes(record), _usage(record)]
    sections += [_verification(record), _routing(record)]
    if results:
        sections.append("## Results\n\n" + markdown_table(results))
    if record.notes:
        sections.append("## Notes\n\n" + "\n".join(f"- {note}" for note in record.notes))
    return "\n\n".join(filter(None, sections)) + "\n"


def markdown_table(rows: Sequence[Row]) -> str:
    """A Markdown table of equal dicts.

    Example:
        >>> print(markdown_table([{"k": 4, "perplexity": 12.3456}]))
        | k | perplexity |
        | --- | ---: |
        | 4 | 12.35 |
    """
    cells = [[_cell(value) for value in row.values()] for row in rows]
    return to_markdown(Table(columns=list(rows[0]), rows=cells))


def _cell(value: str | int | float) -> str:
    text = f"{value:,}" if isinstance(value, int) else figure(value)
    return text.replace("\n", " ")


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
    rows: list[Row] = [
        {"parameters": name.replace("_", " "), "count": count}
        for name, count in record.parameters.items()
    ]
    where = " of a split layer" if record.first_dense_layers else ""
    weights = f"Weights are {record.dtype}, {record.total_bytes:,} bytes."
    if not record.num_experts:
        return f"## Size\n\n{markdown_table(rows)}\n\n{weights}"
    return (
        "## Size\n\n"
        + markdown_table(rows)
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
        "deviations of the logits.\n\n" + markdown_table(_compared(check))
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
    rows: list[Row] = [{"comparison": name, "value": value} for name, value in values.items()]
    return f"{text}\n\n{markdown_table(rows)}"


def _compared(check: Verification) -> list[Row]:
    layers = check.layers
    values = {
        "worst median relative error of a block": max(layer.block_error for layer in layers),
        "worst 95th percentile of it": max(layer.block_error_tail for layer in layers),
        "largest for an outlier token": max(layer.outlier_error for layer in layers),
        "largest share of outlier tokens": max(layer.outliers for layer in layers),
        "worst share of misrouted tokens in a layer": max(layer.misrouted for layer in layers),
        "logit error against the masked dense model": check.logits_error,
        "share of tokens with the same top token": check.top1_agreement,
        "the same where each model routes for itself": check.own_routes_top1_agreement,
        "logit error against the dense model, all experts on": check.dense_error,
    }
    rows = values.items()
    return [{"comparison": name, "value": value} for name, value in rows if value is not None]


def _routing(record: ExportRecord) -> str:
    """The worst layer of each runtime."""
    if not record.routers:
        return ""
    rows: list[Row] = [
        {
            "router as in": groups[0].runtime,
            "misrouted tokens": percent(max(each.misrouted for each in groups)),
            "tied by rounding": percent(max(each.tied for each in groups)),
            "gate deviation (95 % of tokens)": max(each.gate_deviation for each in groups),
            "of the worst token": max(each.largest_gate_deviation for each in groups),
            "common factor, less 1": max((each.gain_error for each in groups), key=abs),
        }
        for groups in zip(*(router.runtimes for router in record.routers), strict=True)
    ]
    return (
        "## Routing in other runtimes\n\n"
        "Routers are written as 2^-p W_r, so that the weights of the chosen experts are all but "
        "equal. What runtimes make of that was imitated on calibration text; figures are those of "
        "the worst layer.\n\n" + markdown_table(rows)
    )
