"""Sections on how the model was made and checked, and on where each figure comes from."""

import json
import shlex
from typing import Any

from dotmoe.report.elements import Markup, command, element, figure, joined, paragraph, table
from dotmoe.report.result_files import Values
from dotmoe.report.sections.parts import Context, Part, Section

_CHECKS = {
    "tokens": "tokens of real text",
    "dtype": "number format",
    "largest_block_error": "block error, worst layer (relative)",
    "largest_misrouted_share": "misrouted share, worst layer",
    "logits_error": "logits, relative error",
    "top1_agreement": "same most likely token, share",
    "all_experts_logits_error": "logits with all experts on, against the dense model",
}


def verification(context: Context) -> list[Part]:
    """The exported checkpoint against the masked dense model, which it must equal."""
    record, export = context.found.results["verification"], context.found.export
    rows = [(_CHECKS.get(name, name), figure(value)) for name, value in record.items()]
    body = [
        paragraph(
            "Before it got its name the checkpoint was loaded with stock Transformers and compared "
            "with the dense model with masked FFNs, which is what was trained and measured."
        )
    ]
    if export is not None:
        body.append(
            paragraph(
                f"Format {export['format']}, {export['dtype']}, "
                f"{export['total_bytes'] / 2**20:,.1f} MiB. Runs in: "
                f"{', '.join(export['servers'])}."
            )
        )
    body.append(table(("check", "value"), rows, caption="Export against masked dense model"))
    return [Section(title="Is the checkpoint what was measured?", body=joined(body))]


def configuration(context: Context) -> list[Part]:
    """The whole config, folded, and how to repeat the run."""
    found = context.found
    config = str(found.run / "config.json")
    again = shlex.join(["dotmoe", found.kind, found.source, "AGAIN", "--config", config])
    body = [
        paragraph("This repeats it (the config holds every option, defaults too):"),
        command(again),
        _folded("config.json", found.config),
    ]
    return [Section(title="How it was made", body=joined(body))]


def origins(context: Context) -> list[Part]:
    """Where each figure comes from: file, origin, time, commit, machine, seed."""
    rows = [
        (name, str(values.get("origin", "-")), *_made(values.get("provenance", {})))
        for name, values in context.found.files.items()
    ]
    columns = ("file", "origin", "time (UTC)", "commit", "hardware", "seed")
    first = context.found.results["provenance"]
    body = [
        paragraph(
            "Every figure of this page is read from one of these files and computed nowhere else. "
            "measured: by running the model here; quoted: from a paper or data sheet; estimated: "
            "from sizes."
        ),
        table(columns, rows, caption="Result files", words=6),
        _folded("Versions of the run", first),
    ]
    return [Section(title="Where the figures come from", body=joined(body))]


def _made(provenance: Values) -> tuple[str, ...]:
    return tuple(str(provenance.get(key, "-")) for key in ("time", "commit", "hardware", "seed"))


def _folded(title: str, values: Any) -> Markup:
    text = json.dumps(values, indent=2, ensure_ascii=False)
    return element("details", element("summary", title), element("pre", text))
