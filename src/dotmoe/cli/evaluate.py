"""`dotmoe evaluate MODEL --text FILE`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from dotmoe.checkpoint_folder import checkpoint_folder, require_checkpoint
from dotmoe.cli.parse import parse
from dotmoe.device import resolved_device
from dotmoe.evaluate import EvaluateConfig, evaluate_checkpoint
from dotmoe.load import LoadConfig, resolved_dtype
from dotmoe.narration import Narrator
from dotmoe.run_folder import export_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateCommand:
    """What to measure."""

    model: Annotated[Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Dense model, exported checkpoint, or run folder."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    load: LoadConfig = field(default_factory=LoadConfig)


def run(arguments: Sequence[str]) -> None:
    """Print the perplexity as JSON."""
    command = parse(EvaluateCommand, "evaluate", arguments)
    local = export_folder(Path(command.model))
    folder = local if local.is_dir() else checkpoint_folder(command.model)
    require_checkpoint(folder)
    device = resolved_device(command.load.device)
    with Narrator().bar("evaluate") as update:
        result = evaluate_checkpoint(
            folder,
            command.evaluate,
            device=device,
            dtype=resolved_dtype(command.load.dtype, device),
            on_progress=update,
        )
    print(json.dumps(result.as_dict(), indent=2))
