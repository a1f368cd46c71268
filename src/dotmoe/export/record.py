"""What an export leaves on record, beside the weights."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dotmoe.checksums import FileSum
from dotmoe.errors import UserError
from dotmoe.export.architecture import Conversion, OutputArchitecture
from dotmoe.export.layer_check import LayerCheck
from dotmoe.export.router_scale import RouterScale
from dotmoe.export.runtime_routers import RuntimeRouting
from dotmoe.export.server_limits import limits_met
from dotmoe.export.shard_writer import WrittenShards
from dotmoe.export.verify import VerificationRecord
from dotmoe.parameters import count_parameters
from dotmoe.sealed_json import SEAL, DamagedError, any_object, require_seal, sealed

RECORD_FILE = "dotmoe.json"
"""Where the record lies in an exported folder."""

REMEDY = (
    "Export again; the export of a run by deleting export and evaluate in its finished/ and "
    "repeating the command."
)
"""What to do about a damaged export."""

_EDITED = "k was changed after export"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRecord:
    """Content of `dotmoe.json`."""

    name: str
    """Name of the exported folder."""
    format: str
    """Output architecture, a key of `OUTPUTS`."""
    servers: list[str]
    """Software that runs it without further code."""
    exactness: str
    """What is exact and what is not, in a clause."""
    source: str
    """Dense model: hub name or folder."""
    revision: str | None
    """Commit of a hub model."""
    dotmoe_version: str
    dtype: str
    """Dtype of the written weights."""
    num_layers: int
    first_dense_layers: int
    """Leading layers that are not split."""
    model_width: int
    """Model width (D)."""
    num_experts: int
    """Experts a layer (E)."""
    expert_size: int
    """Neurons of one expert (s)."""
    shared_size: int
    """Neurons of a split layer that always run."""
    active_experts: int
    """Experts run per token (k)."""
    active_fraction: float
    """Share of a split layer's FFN neurons that run per token."""
    verified_active_experts: int
    """The k of the export, at which `routers` and `verification` were measured."""
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
    verification: VerificationRecord | None
    """None: stock Transformers could not load it."""
    problem: str | None
    """Why it failed its verification; None: it did not."""
    notes: list[str]
    """What a user of the model must know."""
    checksums: dict[str, FileSum] = field(default_factory=dict)
    """Size and SHA-256 of the files beside it but config and card; none in earlier versions."""
    config_sha256: str = ""
    """SHA-256 of what the config says besides k; none in earlier versions."""

    @classmethod
    def load(cls, folder: Path) -> "ExportRecord":
        """The record of an exported folder.

        Raises:
            UserError: There is none, it is damaged, or it is not one of this version.
        """
        path = folder / RECORD_FILE
        if not path.is_file():
            raise UserError(
                f"{folder} holds no {RECORD_FILE}, so it is no export of dotmoe. Name the folder "
                "of one."
            )
        values = _whole(path)
        try:
            verification = values.pop("verification")
            if verification is not None:
                layers = [LayerCheck(**layer) for layer in verification.pop("layers")]
                verification = VerificationRecord(**verification, layers=layers)
            values["routers"] = [_router_scale(router) for router in values["routers"]]
            return cls(**values, verification=verification)
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{path} is no record of a Transformers export by dotmoe {installed_version()} "
                f"({error}). Export again."
            ) from error

    def with_active_experts(self, active_experts: int) -> "ExportRecord":
        """The record of the same weights run with another k, 1 to E.

        What was measured stays, and a note says at which k.
        """
        expert = 3 * self.model_width * self.expert_size
        layers = self.num_layers - self.first_dense_layers
        more = (active_experts - self.active_experts) * expert * layers
        neurons = self.shared_size + self.num_experts * self.expert_size
        notes = [note for note in self.notes if not note.startswith(_EDITED)]
        if active_experts != self.verified_active_experts:
            notes.append(
                f"{_EDITED}, from {self.verified_active_experts} to {active_experts}; routers and "
                f"verification were measured at {self.verified_active_experts}."
            )
        return replace(
            self,
            active_experts=active_experts,
            active_fraction=(self.shared_size + active_experts * self.expert_size) / neurons,
            parameters={
                name: count + more * name.startswith("active")
                for name, count in self.parameters.items()
            },
            notes=notes,
        )

    def as_dict(self) -> dict[str, Any]:
        """As plain types, for JSON."""
        return asdict(self)

    def to_json(self) -> str:
        """As indented JSON with its own checksum."""
        return sealed(self.as_dict())


def record_of(
    name: str,
    conversion: Conversion,
    output: OutputArchitecture,
    shards: WrittenShards,
    scales: Sequence[RouterScale],
    verification: VerificationRecord | None,
    problem: str | None = None,
) -> ExportRecord:
    """The record of a finished export."""
    dense, layout = conversion.dense, conversion.layout
    counts = count_parameters(dense.config, dense.family, conversion.granularity)
    return ExportRecord(
        name=name,
        format=output.name,
        servers=list(output.servers),
        exactness=output.exactness,
        source=dense.source,
        revision=dense.revision,
        dotmoe_version=installed_version(),
        dtype=str(conversion.dtype).removeprefix("torch."),
        num_layers=layout.num_layers,
        first_dense_layers=layout.first_dense_layers,
        model_width=dense.widths.model,
        num_experts=layout.num_experts,
        expert_size=layout.expert_size,
        shared_size=layout.shared_size,
        active_experts=layout.active_experts,
        active_fraction=layout.active_fraction,
        verified_active_experts=layout.active_experts,
        active_experts_key=output.active_experts_key,
        active_experts_editable=output.active_experts_editable,
        parameters={
            "dense": counts.dense_total,
            "stored": counts.stored,
            "active": counts.active,
            "active_with_routers": counts.active_with_routers,
            "active_without_embeddings": counts.active_without_embeddings,
        },
        files=shards.files,
        total_bytes=shards.total_bytes,
        routers=list(scales),
        verification=verification,
        problem=problem,
        notes=[*output.notes(dense, layout), *limits_met(output.config(conversion))],
    )


def installed_version() -> str:
    """Version of this package; `source tree` where it runs without being installed."""
    try:
        return version("dotmoe")
    except PackageNotFoundError:
        return "source tree"


def _whole(path: Path) -> dict[str, Any]:
    try:
        values = any_object(path)
        if SEAL in values or "checksums" in values:  # earlier versions have neither
            require_seal(path, values)
    except DamagedError as error:
        raise UserError(f"{error}. {REMEDY}") from error
    values.pop(SEAL, None)
    return values


def _router_scale(values: dict[str, Any]) -> RouterScale:
    runtimes = [RuntimeRouting(**routing) for routing in values["runtimes"]]
    return RouterScale(**{**values, "runtimes": runtimes})
