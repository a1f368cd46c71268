"""`dotmoe export RUN OUT --format NAME`."""

from collections.abc import Sequence

from rich.console import Console

from dotmoe.cli.parse import parse
from dotmoe.export import explained
from dotmoe.reexport import ReexportConfig, reexport


def run(arguments: Sequence[str]) -> None:
    """Export a finished run again and print what was written."""
    config = parse(ReexportConfig, "export", arguments, f"\n\n{explained()}")
    record = reexport(config)
    console = Console()
    console.print(
        f"{config.out}: {record.format}, {record.active_experts} of {record.num_experts} experts, "
        f"{record.total_bytes:,} bytes in {record.dtype}, verified.",
        soft_wrap=True,
    )
    for note in record.notes:
        console.print(f"- {note}", soft_wrap=True)
