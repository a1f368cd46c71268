"""`dotmoe edit EXPORT --active-experts K`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from dotmoe.cli.parse import parse
from dotmoe.evaluate import gguf_file
from dotmoe.export import set_active_experts
from dotmoe.run_folder import export_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class EditCommand:
    """What to change of an export; its weights stay as they are."""

    export: Annotated[Positional[str], tyro.conf.arg(metavar="EXPORT")]
    """Exported folder, run folder, or GGUF file."""
    active_experts: int
    """Experts that are to run per token (k), 1 to E."""


def run(arguments: Sequence[str]) -> None:
    """Change k in place and say what it was and is."""
    command = parse(EditCommand, "edit", arguments)
    path, active_experts = Path(command.export), command.active_experts
    file = gguf_file(path)
    if file is not None:
        from dotmoe.gguf_export import set_active_experts as set_in_gguf  # an extra

        set_in_gguf(file, active_experts)
        print(f"{file}: {active_experts} experts run per token.")
        return
    record = set_active_experts(export_folder(path), active_experts)
    print(
        f"{export_folder(path)}: {record.active_experts} of {record.num_experts} experts run per "
        f"token, {record.parameters['active']:,} parameters active."
    )
