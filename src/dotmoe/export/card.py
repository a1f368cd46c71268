"""README.md of an exported folder; its text is `card.md.jinja`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import ModelCardData

from dotmoe.export.record import ExportRecord
from dotmoe.models.family import TARGETS
from dotmoe.tables import Table, figure, percent, table_of, to_markdown

CARD_FILE = "README.md"
_TEMPLATE = Path(__file__).with_name("card.md.jinja")


def write_model_card(folder: Path, record: ExportRecord, results: Table | None = None) -> None:
    """Write `README.md`; call it again with results once the exported model has been evaluated."""
    (folder / CARD_FILE).write_text(card_text(record, results), encoding="utf-8")


def card_text(record: ExportRecord, results: Table | None = None) -> str:
    """The content of `README.md`."""
    gguf = record.details if "arch" in record.details else None
    kind = ["mixture-of-experts", "moe"] if record.num_experts else []
    # `base_model` must be a hub name, so a local folder is left out.
    head = ModelCardData(
        base_model=record.source if record.revision else None,
        base_model_relation=("quantized" if gguf else "finetune") if record.revision else None,
        library_name="gguf" if gguf else "transformers",
        pipeline_tag="text-generation",
        tags=["dotmoe", *kind, "gguf" if gguf else record.format],
    )
    how, compared = _comparison(record)
    counts = {name.replace("_", " "): count for name, count in record.parameters.items()}
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        r=record,
        head=head.to_yaml(),
        gguf=gguf,
        splits=[
            each | {"units": TARGETS[each.get("target", "ffn")].units_named}
            for each in record.details.get("splits", [asdict(record)])
        ],
        parameters=_figures(("parameters", "count"), counts),
        how=how,
        compared=_figures(("comparison", "value"), compared),
        routing=_routing(record) if record.routers else None,
        results=None if results is None else to_markdown(results),
    )


def _figures(columns: tuple[str, str], values: dict[str, Any]) -> str:
    rows = [(name, figure(value)) for name, value in values.items() if value is not None]
    return to_markdown(Table(columns=columns, rows=rows))


def _comparison(record: ExportRecord) -> tuple[str, dict[str, Any]]:
    """How the export was compared, and what came out."""
    found = record.verification
    if found is None:
        return "", {}
    ends = "logit errors are medians over tokens, in standard deviations of the logits."
    if "layers" in found:
        figures = found["layers"][0].keys() - {"target"}
        worst = {key: max(layer[key] for layer in found["layers"]) for key in figures}
        return (
            f"Reloaded as `{found['loaded_class']}` and compared in float32 on {found['tokens']} "
            f"tokens at k = {record.verified_active_experts}; {ends}"
        ), {
            "worst median relative error of a block": worst["block_error"],
            "worst 95th percentile of it": worst["block_error_tail"],
            "largest share of outlier tokens": worst["outliers"],
            "worst share of misrouted tokens in a layer": worst["misrouted"],
            "logit error against the masked dense model": found["logits_error"],
            "share of tokens with the same top token": found["top1_agreement"],
            "logit error against the dense model, all experts on": found["dense_error"],
        }
    read = {f"largest relative error of {found['tensors']} tensors": found["storing_error"]}
    run = found["run"]
    if run is None:
        return "Not run in llama.cpp: llama-cpp-python was not installed.", read
    return (
        f"Run in llama-cpp-python {run['runtime']} on {run['tokens']} tokens beside float32 "
        f"Transformers with the weights as stored; {ends}"
    ), read | {
        "logit error against the masked dense model": run["logits_error"],
        "share of tokens with the same top token": run["top1_agreement"],
        "logit error against the dense model, all experts on": run["all_experts_error"],
    }


def _routing(record: ExportRecord) -> str:
    """The worst layer of each runtime."""

    def worst(key: str, show: Any) -> Any:
        return lambda rows: show(max((row[key] for row in rows), key=abs))

    columns = {
        "router as in": lambda rows: rows[0]["runtime"],
        "misrouted tokens": worst("misrouted", percent),
        "gate deviation (95 % of tokens)": worst("gate_deviation", figure),
        "common factor, less 1": worst("gain_error", figure),
    }
    layers = zip(*(router["runtimes"] for router in record.routers), strict=True)
    return to_markdown(table_of(layers, columns))
