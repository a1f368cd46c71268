"""What an export leaves on record beside the weights, and whether its files are as written."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from dotmoe import __version__
from dotmoe.errors import UserError
from dotmoe.export.format import Conversion, Format
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
_COUNTS = ("stored", "active", "active_with_routers", "active_without_embeddings")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRecord:
    """Content of `dotmoe.json`."""

    name: str
    """Name of the exported folder."""
    format: str
    servers: list[str]
    exactness: str
    """What is exact and what is not, in a clause."""
    source: str
    """Dense model that the conversion began with: hub name or folder."""
    revision: str | None
    is_finetuned: bool
    """Whether the written weights are others than the dense model's."""
    dotmoe_version: str
    dtype: str
    """Dtype of the written weights; of a GGUF the number format of its matrices."""
    num_layers: int
    first_dense_layers: int
    model_width: int
    num_experts: int
    """Experts a layer (E); 0 for a dense file, as are all numbers of its split."""
    expert_size: int
    shared_size: int
    active_experts: int
    active_fraction: float
    """Share of a split layer's FFN neurons in the dense model that run per token."""
    verified_active_experts: int
    """The k of the export, at which `routers` and `verification` were measured."""
    active_experts_key: str
    active_experts_editable: bool
    parameters: dict[str, int]
    """Exact counts: `dense`, of a MoE `_COUNTS`, and `written`: of all numbers in the files, with a
    tied head written out and what only the architecture wants, such as zeros."""
    files: list[str]
    """Weight files."""
    total_bytes: int
    routers: list[dict[str, Any]]
    """Scale of each split layer's router; see `routers.scale_routers`."""
    details: dict[str, Any]
    """What is special to the container; empty for Transformers."""
    verification: dict[str, Any] | None
    """What `Format.check` measured; None: it could not be loaded."""
    problems: list[str]
    """Why it failed its verification; none: it did not."""
    notes: list[str]
    checksums: dict[str, Checksum]
    """Size and SHA-256 of the files beside it but config and card."""
    config_sha256: str | None
    """SHA-256 of what the config says besides k; None: a GGUF, which has no config."""
    dropped_size: int = 0
    """Neurons of a split layer that are left out."""

    @classmethod
    def load(cls, folder: Path) -> "ExportRecord":
        """The record of an exported folder.

        Raises:
            UserError: There is none, it is damaged, or it is not one of this version.
        """
        path = folder / RECORD_FILE
        if not path.is_file():
            raise UserError(f"{folder} holds no {RECORD_FILE}. Name an export of dotmoe.")
        try:
            return cls(**read_with_checksum(path))
        except DamagedError as error:
            raise UserError(f"{error}. {_REMEDY}") from error
        except TypeError as error:
            raise UserError(
                f"{path} is no record of an export by dotmoe {__version__} ({error}). {_REMEDY}"
            ) from error

    def with_active_experts(self, active_experts: int) -> "ExportRecord":
        """The record of the same weights run with another k, 1 to E.

        What was measured stays, and a note says at which k.
        """
        expert = self.details.get(
            "parameters_of_an_expert", 3 * self.model_width * self.expert_size
        )
        layers = self.num_layers - self.first_dense_layers
        more = (active_experts - self.active_experts) * expert * layers
        neurons = self.dropped_size + self.shared_size + self.num_experts * self.expert_size
        notes = [note for note in self.notes if not note.startswith(_EDITED)]
        if active_experts != self.verified_active_experts:
            fitted = ", and the weights were fitted at it" if self.is_finetuned else ""
            notes.append(
                f"{_EDITED}, from {self.verified_active_experts} to {active_experts}; routers and "
                f"verification were measured at {self.verified_active_experts}{fitted}."
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

    def verification_in_short(self) -> dict[str, Any]:
        """A few numbers of a verified export: the worst layer, and the whole model."""
        found = self.verification or {}
        return {
            **{key: found[key] for key in ("tokens", "dtype", "logits_error", "top1_agreement")},
            "largest_block_error": max(layer["block_error"] for layer in found["layers"]),
            "largest_misrouted_share": max(layer["misrouted"] for layer in found["layers"]),
            "all_experts_logits_error": found["dense_error"],
        }

    def to_json(self) -> str:
        """As indented JSON with its own checksum."""
        return with_checksum(asdict(self))


def record_of(
    conversion: Conversion, form: Format, folder: Path, origin: DenseModel, **found: Any
) -> ExportRecord:
    """The record of a written folder, whose files are read for their checksums.

    `found` has the fields name, files, routers, verification, problems and notes.
    """
    dense, split = conversion.dense, conversion.granularity
    names = ("num_experts", "expert_size", "active_experts", "shared_size", "dropped_size")
    sizes: dict[str, Any] = {
        name: getattr(split, name) if form.splits else 0 for name in (*names, "first_dense_layers")
    }
    whole = Granularity(num_experts=1, expert_size=dense.widths.ffn, active_experts=1)
    counts = asdict(count_parameters(dense.config, dense.family, split if form.splits else whole))
    details, specs = form.details(conversion), list(form.tensors(conversion))
    has_config = (folder / CONFIG_FILE).is_file()
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != CONFIG_FILE]
    return ExportRecord(
        **found,
        format=form.name,
        servers=list(form.servers),
        exactness=form.exactness(conversion),
        source=origin.source,
        revision=origin.revision,
        is_finetuned=origin.source != dense.source,
        dotmoe_version=__version__,
        dtype=details.get("type", str(conversion.dtype).removeprefix("torch.")),
        num_layers=conversion.layout.num_layers,
        model_width=dense.widths.model,
        **sizes,
        active_fraction=conversion.granularity.active_fraction if form.splits else 1.0,
        verified_active_experts=sizes["active_experts"],
        active_experts_key=form.active_experts_key,
        # Where attention has a k of its own, one number does not say it.
        active_experts_editable=form.active_experts_editable and split.beside is None,
        parameters={"dense": counts["dense_total"]}
        | {name: counts[name] for name in _COUNTS if form.splits}
        | {"written": sum(prod(spec.shape) for spec in specs)},
        total_bytes=sum(spec.num_bytes for spec in specs),
        details=details,
        checksums=checksums(folder, [path.relative_to(folder).as_posix() for path in paths]),
        config_sha256=_config_sha256(folder, form.active_experts_key) if has_config else None,
    )


def require_checksums(folder: Path, *, read_weights: bool = True) -> None:
    """Refuse an exported folder of which a file is not as the export left it.

    A folder without a record passes: it is not ours. The cost is that of SHA-256 over the
    checkpoint; wrong sizes are found first. `read_weights` False compares only the size of weight
    files, for who does not use them.

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
    config = read_json(folder / CONFIG_FILE)
    config.pop(active_experts_key, None)
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
