"""What an export leaves on record beside the weights, and whether its files are as written."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dotmoe.errors import UserError
from dotmoe.export.format import Conversion, Format
from dotmoe.export.gguf_record import GgufVerification, RunCheck
from dotmoe.export.routers import RouterScale, RuntimeRouting
from dotmoe.export.verify import LayerCheck, Verification
from dotmoe.files import (
    Checksum,
    DamagedError,
    checksums,
    damage_in,
    read_json,
    read_with_checksum,
    with_checksum,
)
from dotmoe.granularity import Granularity
from dotmoe.models.dense import DenseModel
from dotmoe.parameters import count_parameters

RECORD_FILE = "dotmoe.json"
"""Where the record lies in an exported folder."""
CONFIG_FILE = "config.json"
_REMEDY = "Export the run again: dotmoe export RUN OUT."
_EDITED = "k was changed after export"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRecord:
    """Content of `dotmoe.json`."""

    name: str
    """Name of the exported folder."""
    format: str
    """A key of `FORMATS`."""
    servers: list[str]
    """Software that runs it without further code."""
    exactness: str
    """What is exact and what is not, in a clause."""
    source: str
    """Dense model that the conversion began with: hub name or folder."""
    revision: str | None
    """Commit of a hub model."""
    is_finetuned: bool
    """Whether the written weights are others than the dense model's."""
    dotmoe_version: str
    dtype: str
    """Dtype of the written weights; of a GGUF the number format of its matrices."""
    num_layers: int
    first_dense_layers: int
    """Leading layers that are not split."""
    model_width: int
    """Model width (D)."""
    num_experts: int
    """Experts a layer (E); 0 for a dense file, as are all numbers of its split."""
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
    """Bytes of all weight files."""
    routers: list[RouterScale]
    """Scaling of each split layer's router."""
    details: dict[str, Any]
    """What is special to the container; empty for Transformers."""
    verification: Any
    """A `Verification` or `GgufVerification`; None: it could not be loaded."""
    problems: list[str]
    """Why it failed its verification; none: it did not."""
    notes: list[str]
    """What a user of the model must know."""
    checksums: dict[str, Checksum]
    """Size and SHA-256 of the files beside it but config and card."""
    config_sha256: str | None
    """SHA-256 of what the config says besides k; None: a GGUF, which has no config."""

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
        try:
            values = read_with_checksum(path)
        except DamagedError as error:
            raise UserError(f"{error}. {_REMEDY}") from error
        try:
            check = values["verification"]
            if check is not None and "layers" in check:
                layers = [LayerCheck(**layer) for layer in check.pop("layers")]
                values["verification"] = Verification(**check, layers=layers)
            elif check is not None:
                run = check.pop("run")
                run = None if run is None else RunCheck(**run)
                values["verification"] = GgufVerification(**check, run=run)
            for router in values["routers"]:
                router["runtimes"] = [RuntimeRouting(**row) for row in router["runtimes"]]
            values["routers"] = [RouterScale(**router) for router in values["routers"]]
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{path} is no record of an export by dotmoe {installed_version()} "
                f"({error}). {_REMEDY}"
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

    def to_json(self) -> str:
        """As indented JSON with its own checksum."""
        return with_checksum(asdict(self))


def record_of(
    conversion: Conversion,
    form: Format,
    folder: Path,
    *,
    name: str,
    origin: DenseModel,
    files: Sequence[str],
    routers: Sequence[RouterScale],
    verification: Any,
    problems: Sequence[str],
    notes: Sequence[str],
) -> ExportRecord:
    """The record of a written folder, whose files are read for their checksums."""
    dense, layout, split = conversion.dense, conversion.layout, conversion.granularity
    whole = Granularity(num_experts=1, expert_size=dense.widths.ffn, active_experts=1)
    counts = count_parameters(dense.config, dense.family, split if form.splits else whole)
    parameters = {"dense": counts.dense_total}
    if form.splits:
        parameters |= {
            "stored": counts.stored,
            "active": counts.active,
            "active_with_routers": counts.active_with_routers,
            "active_without_embeddings": counts.active_without_embeddings,
        }
    details, sizes = form.details(conversion), asdict(split)
    has_config = (folder / CONFIG_FILE).is_file()
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != CONFIG_FILE]
    return ExportRecord(
        name=name,
        format=form.name,
        servers=list(form.servers),
        exactness=form.exactness(conversion),
        source=origin.source,
        revision=origin.revision,
        is_finetuned=origin.source != dense.source,
        dotmoe_version=installed_version(),
        dtype=details.get("type", str(conversion.dtype).removeprefix("torch.")),
        num_layers=layout.num_layers,
        model_width=dense.widths.model,
        **(sizes if form.splits else dict.fromkeys(sizes, 0)),
        active_fraction=layout.active_fraction if form.splits else 1.0,
        verified_active_experts=layout.active_experts if form.splits else 0,
        active_experts_key=form.active_experts_key,
        active_experts_editable=form.active_experts_editable,
        parameters=parameters,
        files=list(files),
        total_bytes=sum(spec.num_bytes for spec in form.tensors(conversion)),
        routers=list(routers),
        details=details,
        verification=verification,
        problems=list(problems),
        notes=list(notes),
        checksums=checksums(folder, [path.relative_to(folder).as_posix() for path in paths]),
        config_sha256=_config_sha256(folder, form.active_experts_key) if has_config else None,
    )


def installed_version() -> str:
    """Version of this package; `source tree` where it runs without being installed."""
    try:
        return version("dotmoe")
    except PackageNotFoundError:
        return "source tree"


# --- intact or not ----------------------------------------------------------------------------


def require_intact(folder: Path, *, read_weights: bool = True) -> None:
    """Refuse an exported folder of which a file is not as the export left it.

    A folder without a record passes: it is not ours. The cost is that of SHA-256 over the
    checkpoint; wrong sizes are found first.

    Args:
        folder: A checkpoint folder.
        read_weights: False compares only the size of weight files, for who does not use them.

    Raises:
        UserError: A file is missing, truncated or altered, or k is not that of the record.
    """
    if not (folder / RECORD_FILE).is_file():
        if folder.name == "5_export":
            raise UserError(f"{folder / RECORD_FILE} is missing. {_REMEDY}")
        return
    record = ExportRecord.load(folder)
    sums = record.checksums
    small = {name: each for name, each in sums.items() if name not in record.files}
    damage = damage_in(folder, sums, contents=False)
    damage = damage or damage_in(folder, sums if read_weights else small)
    if damage is not None:
        raise UserError(f"{damage}. {_REMEDY}")
    if record.config_sha256 is None:
        return
    require_config(folder, record)
    active_experts = read_json(folder / CONFIG_FILE).get(record.active_experts_key)
    if active_experts != record.active_experts:
        raise UserError(
            f"{folder / CONFIG_FILE} runs {active_experts} experts per token, but {RECORD_FILE} "
            f"says {record.active_experts}. Set what is right: dotmoe edit {folder} "
            "--active-experts K."
        )


def require_config(folder: Path, record: ExportRecord) -> None:
    """Refuse an exported folder whose config is another than the export wrote, but for k.

    Raises:
        UserError: It is missing, truncated or altered.
    """
    if _config_sha256(folder, record.active_experts_key) != record.config_sha256:
        raise UserError(
            f"{folder / CONFIG_FILE} has been altered: its SHA-256 without "
            f"{record.active_experts_key} is not that of what was written. {_REMEDY}"
        )


def _config_sha256(folder: Path, active_experts_key: str) -> str:
    """SHA-256 of what an exported folder's config says besides k."""
    config: dict[str, Any] = read_json(folder / CONFIG_FILE)
    config.pop(active_experts_key, None)
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
