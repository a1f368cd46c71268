"""`dotmoe export RUN OUT --format NAME`."""

from collections.abc import Sequence

from rich.console import Console

from dotmoe.cli.parse import parse
from dotmoe.export import ExportRecord, explained
from dotmoe.reexport import ReexportConfig, reexport

GGUF = """gguf: for llama.cpp, as gguf_glm4moe (gates exactly 1) or gguf_llama, whichever holds the
model; k can be edited; gguf_dense: the dense model, to compare with."""


def run(arguments: Sequence[str]) -> None:
    """Export a finished run again and print what was written."""
    notes = f"\n\n{explained()}\n\n{' '.join(GGUF.split())}"
    config = parse(ReexportConfig, "export", arguments, notes)
    record = reexport(config)
    number_format = record.dtype if isinstance(record, ExportRecord) else record.type
    split = f"{record.active_experts} of {record.num_experts} experts"
    console = Console()
    console.print(
        f"{config.out}: {record.format}, {split if record.num_experts else 'dense'}, "
        f"{record.total_bytes:,} bytes in {number_format}, verified.",
        soft_wrap=True,
        markup=False,
    )
    for note in record.notes:
        console.print(f"- {note}", soft_wrap=True, markup=False)
