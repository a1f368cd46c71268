"""What an export leaves on record, beside the weights."""

import json
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dotmoe.export.layer_check import LayerCheck
from dotmoe.export.router_scale import RouterScale
from dotmoe.export.verify import VerificationRecord

RECORD_FILE = "dotmoe.json"
"""Where the record lies in an exported folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRecord:
    """Content of `dotmoe.json`."""

    name: str
    """Name of the exported folder."""
    format: str
    """Output architecture, a key of `OUTPUTS`."""
    source: str
    """Dense model: hub name or folder."""
    revision: str | None
    """Commit of a hub model."""
    dotmoe_version: str
    dtype: str
    """Dtype of the written weights."""
    num_layers: int
    num_experts: int
    """Experts a layer (E)."""
    expert_size: int
    """Neurons of one expert (s)."""
    active_experts: int
    """Experts run per token (k)."""
    active_experts_key: str
    """Config key that holds k."""
    active_experts_editable: bool
    """Whether k may be changed there."""
    parameters: dict[str, int]
    """Exact counts: dense, stored, active, active with routers, active without embeddings."""
    files: list[str]
    """Weight files."""
    total_bytes: int
    """Bytes of all tensors, with the architecture's own extras."""
    routers: list[RouterScale]
    """Scaling of each layer's router."""
    verification: VerificationRecord
    notes: list[str]
    """What a user of the model must know."""

    @classmethod
    def load(cls, folder: Path) -> "ExportRecord":
        """The record of an exported folder."""
        values = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
        verification = values.pop("verification")
        layers = [LayerCheck(**layer) for layer in verification.pop("layers")]
        return cls(
            **{**values, "routers": [RouterScale(**router) for router in values["routers"]]},
            verification=VerificationRecord(**verification, layers=layers),
        )

    def as_dict(self) -> dict[str, Any]:
        """As plain types, for JSON."""
        return asdict(self)

    def to_json(self) -> str:
        """As indented JSON."""
        return json.dumps(self.as_dict(), indent=2) + "\n"


def installed_version() -> str:
    """Version of this package; `source tree` where it runs without being installed."""
    try:
        return version("dotmoe")
    except PackageNotFoundError:
        return "source tree"
