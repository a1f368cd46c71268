"""`dotmoe inspect MODEL`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from tyro.conf import Positional

from dotmoe.cli.parse import parse
from dotmoe.granularity import ExpertsConfig
from dotmoe.inspection import (
    ExportDtype,
    FinetuneSize,
    Machines,
    RunSize,
    inspect_model,
    render,
    stored_dtype,
)
from dotmoe.load import dense_config
from dotmoe.models.family import family_of


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectCommand:
    """What to look at before paying for a conversion."""

    model: Positional[str]
    """Local folder or hub name of the dense model; `embedded` is the one that comes along."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    run: RunSize = field(default_factory=RunSize)
    machines: Machines = field(default_factory=Machines)
    finetune: FinetuneSize = field(default_factory=FinetuneSize)
    export_dtype: ExportDtype = "source"
    """Dtype of the exported weights, as for convert; `source` keeps the checkpoint's."""
    details: bool = False
    """List what each size of memory and disk is the sum of, and all ways that were weighed."""
    json: bool = False
    """Print JSON, always with details, instead of tables."""


def run(arguments: Sequence[str]) -> None:
    """Print what a conversion would cost."""
    command = parse(InspectCommand, "inspect", arguments)
    config, folder = dense_config(command.model)
    family = family_of(config)
    inspection = inspect_model(
        config,
        family,
        command.experts,
        command.run,
        stored=stored_dtype(config, family, folder),
        export_dtype=command.export_dtype,
        machines=command.machines,
        finetune=command.finetune,
    )
    if command.json:
        print(json.dumps({"model": command.model, **inspection.as_dict()}, indent=2))
    else:
        Console().print(render(inspection, details=command.details))
