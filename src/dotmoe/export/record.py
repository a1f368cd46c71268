"""Record and model card of an export; verify its checksums, and change its k."""

import shutil
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import ModelCardData

from dotmoe import __version__
from dotmoe.common.errors import UserError, require_package
from dotmoe.common.files import (
    Checksum,
    checksums,
    complete_folder,
    content_sha256,
    damage_in,
    read_json,
    read_with_checksum,
    with_checksum,
    write_json,
)
from dotmoe.common.tables import Table, figure, percent, to_markdown
from dotmoe.export.format import Conversion, Format
from dotmoe.export.parameters import count_parameters
from dotmoe.method.granularity import Granularity
from dotmoe.method.layout import splits_in
from dotmoe.models.family import TARGETS

RECORD_FILE = "dotmoe.json"
CONFIG_FILE = "config.json"
CARD_FILE = "README.md"
_TEMPLATE = Path(__file__).with_name("card.md.jinja")
_REMEDY = "Export the run again: dotmoe export RUN OUT."
_EDITED = "k was changed after export"
_SIZES = (
    *("num_experts", "expert_size", "active_experts"),
    *("shared_size", "dropped_size", "first_dense_layers"),
)
_COUNTS = ("stored", "active", "active_with_routers", "active_without_embeddings")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRecord:
    """Content of `dotmoe.json`."""

    name: str
    format: str
    servers: list[str]
    exactness: str
    source: str
    """Original dense model, before any repair or finetuning: its `DenseModel.name`."""
    revision: str | None
    is_finetuned: bool
    """Whether the written weights differ from the original dense model's."""
    dotmoe_version: str
    dtype: str
    """Dtype of the written weights; for a GGUF, the number format of its matrices."""
    num_layers: int
    first_dense_layers: int
    model_width: int
    num_experts: int
    """Experts per layer (E); this and all other sizes of the split are 0 for a dense file."""
    expert_size: int
    shared_size: int
    active_experts: int
    active_fraction: float
    """Share of a split layer's FFN neurons in the dense model that run per token."""
    verified_active_experts: int
    """The k at which `routers` and `verification` were measured."""
    active_experts_key: str
    active_experts_editable: bool
    parameters: dict[str, int]
    """Exact counts: `dense`; for a MoE, `_COUNTS`; and `written`, all numbers in the files, with a
    tied head that is written out and what only the architecture needs, such as zeros."""
    files: list[str]
    total_bytes: int
    routers: list[dict[str, Any]]
    """Scale of each layer's router, as returned by `routers.scale_routers`."""
    details: dict[str, Any]
    """Extra fields of a GGUF or of format dotmoe; empty for other formats."""
    verification: dict[str, Any] | None
    """Measurements of `Format.check`; None if it failed before it could measure."""
    problems: list[str]
    """Reasons why the export failed its verification; empty if it passed."""
    notes: list[str]
    checksums: dict[str, Checksum]
    """Size and SHA-256 of the export's files except record, config and card."""
    config_sha256: str | None
    """SHA-256 of the config without its k; None for a GGUF, which has no config."""
    dropped_size: int = 0
    """Number of neurons of each split layer that are left out."""

    @classmethod
    def load(cls, folder: Path) -> "ExportRecord":
        """Read the record of an exported folder; refuse a missing, damaged or foreign one."""
        path = folder / RECORD_FILE
        if not path.is_file():
            raise UserError(f"{folder} holds no {RECORD_FILE}. Give a folder that dotmoe exported.")
        try:
            return cls(**read_with_checksum(path))
        except (UserError, TypeError) as error:
            raise UserError(
                f"{path} is not an export record of dotmoe {__version__} ({error}). {_REMEDY}"
            ) from error

    def with_active_experts(self, active_experts: int) -> "ExportRecord":
        """The record after changing k; measurements stay, with a note of the k that they are at."""
        expert = 3 * self.model_width * self.expert_size
        expert = self.details.get("parameters_of_an_expert", expert)
        layers = self.num_layers - self.first_dense_layers
        more = (active_experts - self.active_experts) * expert * layers
        neurons = self.dropped_size + self.shared_size + self.num_experts * self.expert_size
        parameters = {
            name: count + more * name.startswith("active")
            for name, count in self.parameters.items()
        }
        notes = [note for note in self.notes if not note.startswith(_EDITED)]
        if active_experts != (measured_at := self.verified_active_experts):
            fitted = ", and the weights were fitted at it" if self.is_finetuned else ""
            notes.append(
                f"{_EDITED}, from {measured_at} to {active_experts}; routers and verification were "
                f"measured at {measured_at}{fitted}."
            )
        return replace(
            self,
            active_experts=active_experts,
            active_fraction=(self.shared_size + active_experts * self.expert_size) / neurons,
            parameters=parameters,
            notes=notes,
        )

    def verification_in_short(self) -> dict[str, Any]:
        """The main metrics of the verification: of the worst layer, and of the whole model."""
        measured = self.verification or {}
        if "layers" not in measured:  # of a GGUF
            run = measured.get("run") or {}
            return {name: value for name, value in measured.items() if name != "run"} | run
        return {
            **{key: measured[key] for key in ("tokens", "dtype", "logits_error", "top1_agreement")},
            "largest_block_error": max(layer["block_error"] for layer in measured["layers"]),
            "largest_misrouted_share": max(layer["misrouted"] for layer in measured["layers"]),
            "all_experts_logits_error": measured["dense_error"],
        }

    def write(self, folder: Path) -> None:
        """Write `dotmoe.json`, and the card beside it."""
        (folder / RECORD_FILE).write_text(with_checksum(asdict(self)), encoding="utf-8")
        write_model_card(folder, self)


def record_of(conversion: Conversion, form: Format, folder: Path, **others: Any) -> ExportRecord:
    """Build the record of a written folder; `others` are the fields that are not derived here."""
    dense, origin, splits = conversion.dense, conversion.origin, splits_in(conversion.layouts)
    if not form.splits:
        splits = (Granularity(num_experts=1, expert_size=dense.widths.ffn, active_experts=1),)
    first = asdict(splits[0])
    sizes: dict[str, Any] = {name: first[name] if form.splits else 0 for name in _SIZES}
    counts = asdict(count_parameters(dense.config, dense.family, splits))
    details, specs = form.details(conversion), list(form.tensors(conversion))
    has_config = (folder / CONFIG_FILE).is_file()
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != CONFIG_FILE]
    return ExportRecord(
        **others,
        format=form.name,
        servers=list(form.servers),
        exactness=form.exactness(conversion),
        source=origin.name,
        revision=origin.revision,
        is_finetuned=origin.source != dense.source,
        dotmoe_version=__version__,
        dtype=details.get("type", conversion.dtype_name),
        num_layers=dense.widths.layers,
        model_width=dense.widths.model,
        **sizes,
        active_fraction=splits[0].active_fraction,
        verified_active_experts=sizes["active_experts"],
        active_experts_key=form.active_experts_key,
        # If attention has a k of its own, one number cannot set both.
        active_experts_editable=form.active_experts_editable and len(splits) == 1,
        parameters={"dense": counts["dense_total"]}
        | {name: counts[name] for name in _COUNTS if form.splits}
        | {"written": sum(prod(spec.shape) for spec in specs)},
        total_bytes=sum(spec.num_bytes for spec in specs),
        details=details,
        checksums=checksums(folder, [path.relative_to(folder).as_posix() for path in paths]),
        config_sha256=_config_and_k(folder, form.active_experts_key)[0] if has_config else None,
    )


def require_checksums(folder: Path, *, read_weights: bool = True) -> None:
    """Refuse an exported folder if a file, or k, was changed other than by `dotmoe export`.

    A folder without a record passes unless it is a run's `5_export`: dotmoe did not write it.
    Without `read_weights`, for callers that do not use them, only sizes of weights are compared.
    """
    if not (folder / RECORD_FILE).is_file():
        if folder.name == "5_export":
            raise UserError(f"{folder / RECORD_FILE} is missing. {_REMEDY}")
        return
    record = ExportRecord.load(folder)
    damage = damage_in(folder, record.checksums, unread=() if read_weights else record.files)
    if damage is not None:
        raise UserError(f"{damage}. {_REMEDY}")
    if record.config_sha256 and (k := _require_config(folder, record)) != record.active_experts:
        raise UserError(
            f"{folder / CONFIG_FILE} sets {k} experts per token, but {RECORD_FILE} records "
            f"{record.active_experts}. Set the right one: dotmoe export {folder} --in-place "
            "--active-experts K."
        )


def _require_config(folder: Path, record: ExportRecord) -> Any:
    """Read k from an exported folder's config; refuse a config that was altered otherwise."""
    sha256, active_experts = _config_and_k(folder, record.active_experts_key)
    if sha256 != record.config_sha256:
        raise UserError(
            f"{folder / CONFIG_FILE} has been altered: its SHA-256 without "
            f"{record.active_experts_key} is not the recorded one. {_REMEDY}"
        )
    return active_experts


def _config_and_k(folder: Path, active_experts_key: str) -> tuple[str, Any]:
    """SHA-256 of an exported folder's config without k, and k."""
    config = read_json(folder / CONFIG_FILE)
    active_experts = config.pop(active_experts_key, None)
    return content_sha256(config), active_experts


def set_active_experts(folder: Path, active_experts: int) -> ExportRecord:
    """Change how many experts of an exported folder run (k, 1 to E); its weights stay as they are.

    The file that a runtime reads k from is replaced last, atomically: if the process is killed, the
    model has either the old k or the new one, and repeating the call completes the change. After a
    write error, such as a full disk, all files are the old ones. The new card omits perplexities,
    because they were measured with the old k. Raises a `UserError` if there is no such export, if
    it is damaged, if its weights depend on k, or if k is out of range.
    """
    record = ExportRecord.load(folder)
    require_free_k(folder, record, active_experts)
    changed = record.with_active_experts(active_experts)
    name, new = CONFIG_FILE, folder / ".new"
    shutil.rmtree(new, ignore_errors=True)  # left by a call that was killed
    with complete_folder(new) as made:
        if record.config_sha256 is None:
            name = record.files[0]
            require_package("gguf", "gguf", f"{folder / name}, a GGUF,")
            from dotmoe.export.gguf_file import write_with_active_experts

            # With the recorded k, the checksum must match, whatever k a killed edit left in it.
            write_with_active_experts(folder / name, record.active_experts, made / name)
            if damage := damage_in(made, {name: record.checksums[name]}):
                raise UserError(f"{damage.replace(str(made), str(folder))}. {_REMEDY}")
            write_with_active_experts(folder / name, active_experts, made / name)
            changed = replace(changed, checksums=record.checksums | checksums(made, [name]))
        else:
            _require_config(folder, record)
            config = read_json(folder / name) | {record.active_experts_key: active_experts}
            write_json(made / name, config)
        changed.write(made)
    for each in (RECORD_FILE, CARD_FILE, name):
        (new / each).replace(folder / each)
    new.rmdir()
    return changed


def require_free_k(folder: Path, record: ExportRecord, active_experts: int) -> None:
    """Refuse a k that is out of range, and any k if the weights of the export depend on it."""
    if not record.num_experts:
        raise UserError(f"{folder} holds a dense model, which has no experts. Give a MoE.")
    if not 1 <= active_experts <= record.num_experts:
        raise UserError(
            f"active_experts is {active_experts}, but {folder} has {record.num_experts} experts a "
            f"layer. Choose 1 to {record.num_experts}."
        )
    if not record.active_experts_editable:
        raise UserError(
            f"k of {folder} is {record.active_experts} and cannot be changed: this "
            f"{record.format} export is for one k. Export the run again: dotmoe export RUN OUT "
            f"--format {record.format} --active-experts {active_experts}."
        )


def write_model_card(folder: Path, record: ExportRecord, results: Table | None = None) -> None:
    """Write `README.md`; call it again with results once the exported model has been evaluated."""
    gguf = record.details if "arch" in record.details else None
    kind = ["mixture-of-experts", "moe"] if record.num_experts else []
    # `base_model` must be a hub name, so a local folder is left out.
    head = ModelCardData(
        base_model=record.source if record.revision else None,
        base_model_relation=("quantized" if gguf else "finetune") if record.revision else None,
        library_name="gguf" if gguf else "transformers",
        pipeline_tag="text-generation",
        tags=["dotmoe", *kind, "gguf" if gguf else record.format],
    )
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    splits = record.details.get("splits", [asdict(record) | {"target": "ffn"}])
    text = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        r=record,
        head=head.to_yaml(),
        gguf=gguf,
        splits=[each | {"units": TARGETS[each["target"]].units_named} for each in splits],
        parameters=_figures("parameters", record.parameters),
        compared=_figures("comparison", record.verification_in_short()),
        routing=_routing(record) if record.routers else None,
        results=None if results is None else to_markdown(results),
    )
    (folder / CARD_FILE).write_text(text, encoding="utf-8")


def _figures(what: str, values: dict[str, Any]) -> str:
    rows = [(name.replace("_", " "), figure(value)) for name, value in values.items()]
    return to_markdown(Table(columns=(what, "value"), rows=rows))


def _routing(record: ExportRecord) -> str:
    """Table of each runtime's worst layer, in Markdown."""
    rows = []
    for layers in zip(*(router["runtimes"] for router in record.routers), strict=True):
        misrouted, deviation, gain = (
            max((row[key] for row in layers), key=abs)
            for key in ("misrouted", "gate_deviation", "gain_error")
        )
        rows.append((layers[0]["runtime"], percent(misrouted), figure(deviation), figure(gain)))
    gates = ("gate deviation (95 % of tokens)", "common factor, less 1")
    return to_markdown(Table(columns=("router as in", "misrouted tokens", *gates), rows=rows))
