"""Record and model card of an export; verify its checksums."""

import logging
from dataclasses import asdict, dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import ModelCardData

from dotmoe import __version__
from dotmoe.common.errors import UserError
from dotmoe.common.files import Checksum, checksums, damage_in, read_json, write_json, write_text
from dotmoe.common.tables import Table, figure, to_markdown, without_html
from dotmoe.export.format import ConvertedModel, Format
from dotmoe.export.parameters import count_parameters
from dotmoe.method.granularity import Granularity
from dotmoe.method.layout import splits_in
from dotmoe.models.targets import TARGETS

logger = logging.getLogger(__name__)

RECORD_FILE = "dotmoe.json"
CARD_FILE = "README.md"
EDITABLE = ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja")
"""Files of settings, which users edit: k, how text is generated, how chats are written."""
_TEMPLATES = jinja2.Environment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True, finalize=without_html
)
_TEMPLATES.loader = jinja2.FileSystemLoader(Path(__file__).parent)
_REMEDY = "Export the run again: dotmoe export RUN OUT."
_SIZES = (
    "num_experts",
    "expert_size",
    "active_experts",
    "shared_size",
    "dropped_size",
    "first_dense_layers",
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
    """Size and SHA-256 of the export's files except record and card."""
    context_lowered: str = ""
    """Sentence that says so, if the context is shorter than the dense model's; also in `notes`."""
    dropped_size: int = 0
    """Number of neurons of each split layer that are left out."""

    @classmethod
    def load(cls, folder: Path) -> "ExportRecord":
        """Read the record of an exported folder; refuse a missing, damaged or foreign one."""
        path = folder / RECORD_FILE
        if not path.is_file():
            raise UserError(f"{folder} holds no {RECORD_FILE}. Give a folder that dotmoe exported.")
        try:
            known = {field.name for field in fields(cls)}  # older records have others, too
            return cls(**{k: v for k, v in read_json(path).items() if k in known})
        except (UserError, TypeError) as error:
            raise UserError(
                f"{path} is not an export record of dotmoe {__version__} ({error}). {_REMEDY}"
            ) from error

    @property
    def target(self) -> str:
        """What is split, a name of `TARGETS`; the first if both are."""
        splits = self.details.get("splits")
        return str(splits[0]["target"]) if splits else "ffn"

    def active_at(self, active_experts: int) -> tuple[float, int]:
        """Active share of a split layer's neurons, and active parameters, with another k."""
        expert = 3 * self.model_width * self.expert_size
        expert = self.details.get("parameters_of_an_expert", expert)
        layers = self.num_layers - self.first_dense_layers
        more = (active_experts - self.active_experts) * expert * layers
        neurons = self.dropped_size + self.shared_size + self.num_experts * self.expert_size
        share = (self.shared_size + active_experts * self.expert_size) / neurons
        return share, self.parameters["active"] + more

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
        write_json(folder / RECORD_FILE, asdict(self))
        write_model_card(folder, self)


def record_of(converted: ConvertedModel, form: Format, folder: Path, **others: Any) -> ExportRecord:
    """Build the record of a written folder; `others` are the fields that are not derived here."""
    dense, origin = converted.dense, converted.origin
    splits = splits_in(converted.layouts)
    if not form.has_experts:
        splits = (Granularity(num_experts=1, expert_size=dense.widths.ffn, active_experts=1),)
    first = asdict(splits[0])
    counts = asdict(count_parameters(dense.model, dense.family, splits))
    sizes: dict[str, Any] = dict.fromkeys(_SIZES, 0)
    parameters = {"dense": counts["dense_total"]}
    if form.has_experts:
        sizes = {name: first[name] for name in _SIZES}
        parameters |= {name: counts[name] for name in _COUNTS}
    details = form.details(converted)
    specs = list(form.tensors(converted))
    parameters["written"] = sum(prod(spec.shape) for spec in specs)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return ExportRecord(
        **others,
        format=form.name,
        servers=list(form.runs_in(dense)),
        exactness=form.exactness(converted),
        source=origin.name,
        revision=origin.revision,
        is_finetuned=origin.source != dense.source,
        dotmoe_version=__version__,
        dtype=details.get("type", converted.dtype_name),
        num_layers=dense.widths.layers,
        model_width=dense.widths.model,
        **sizes,
        active_fraction=splits[0].active_fraction,
        active_experts_key=form.active_experts_key,
        # If attention has a k of its own, one number cannot set both.
        active_experts_editable=form.active_experts_editable and len(splits) == 1,
        parameters=parameters,
        total_bytes=sum(spec.num_bytes for spec in specs),
        details=details,
        checksums=checksums(folder, [path.relative_to(folder).as_posix() for path in paths]),
    )


def require_checksums(folder: Path, *, read_weights: bool = True) -> None:
    """Refuse an exported folder if one of its files is damaged; warn of one that was edited.

    A folder without a record passes unless it is a run's `5_export`: dotmoe did not write it.
    Without `read_weights`, for callers that do not use them, only sizes of weights are compared.
    """
    if not (folder / RECORD_FILE).is_file():
        if folder.name == "5_export":
            raise UserError(f"{folder / RECORD_FILE} is missing. {_REMEDY}")
        return
    record = ExportRecord.load(folder)
    edited = edited_files(folder, record)
    expected = {name: sums for name, sums in record.checksums.items() if name not in edited}
    damage = damage_in(folder, expected, unread=() if read_weights else record.files)
    if damage is not None:
        raise UserError(f"{damage}. {_REMEDY}")
    _warn_of_edits(folder, record, edited, "it is used as it is")


def say_unread_edits(folder: Path, what: str) -> None:
    """Warn of edited files of a run's export, for a command that reads the run's experts instead.

    `what` says what it makes of them. A folder whose record cannot be read is passed over.
    """
    try:
        record = ExportRecord.load(folder)
    except UserError:
        return
    said = f"{what} is of the run's experts, which this does not change"
    _warn_of_edits(folder, record, edited_files(folder, record), said)


def _warn_of_edits(folder: Path, record: ExportRecord, edited: list[str], what: str) -> None:
    for name in edited:
        change = _change_of_k(folder, record) if name == "config.json" else ""
        logger.warning("%s was edited after the export%s; %s", folder / name, change, what)


def edited_files(folder: Path, record: ExportRecord) -> list[str]:
    """Names of the files of an export that somebody edited: settings that can still be read."""
    names = [name for name in EDITABLE if name in record.checksums and (folder / name).is_file()]
    found = checksums(folder, names)
    return [n for n in names if found[n] != record.checksums[n] and _is_readable(folder / n)]


def active_experts_of(folder: Path, record: ExportRecord) -> int:
    """The k that an export runs with: that of config.json, where it can be edited.

    Raises `UserError` for a number that is not among 1 to E.
    """
    found = read_json(folder / "config.json").get(record.active_experts_key)
    if not record.num_experts or found is None:
        return record.active_experts
    if isinstance(found, bool) or found not in range(1, record.num_experts + 1):
        raise UserError(
            f"{record.active_experts_key} in {folder / 'config.json'} is {found!r}, but there are "
            f"{record.num_experts} experts a layer. Set it to a number from 1 to "
            f"{record.num_experts}."
        )
    return int(found)


def require_written_k(folder: Path) -> None:
    """Refuse an export whose config has another k than it was written with."""
    record = ExportRecord.load(folder)
    if (active := active_experts_of(folder, record)) != record.active_experts:
        raise UserError(
            f"{record.active_experts_key} in {folder / 'config.json'} is {active}, but the export "
            f"was written and measured with {record.active_experts}. Set it back to that; dotmoe "
            f"export RUN OUT --active-experts {active} makes a copy with the other."
        )


def _change_of_k(folder: Path, record: ExportRecord) -> str:
    """What is said of an edited config: its k, if that is another."""
    if (active := active_experts_of(folder, record)) == record.active_experts:
        return ""
    change = f" ({record.active_experts_key} {active}, written with {record.active_experts}"
    if not record.active_experts_editable:
        change += "; its weights are right for that one alone: dotmoe export RUN OUT "
        change += f"--active-experts {active} makes others"
    return f"{change})"


def _is_readable(path: Path) -> bool:
    """Whether a file of settings can be read: JSON of one object, or a template that has text."""
    try:
        if path.suffix == ".json":
            return bool(read_json(path))
        return bool(path.read_text("utf-8").strip())
    except (UserError, UnicodeDecodeError):
        return False


def write_model_card(folder: Path, record: ExportRecord, *results: Table | str) -> None:
    """Write `README.md`; call it again with results once the exported model has been evaluated.

    Results are tables and sentences.
    """
    gguf = record.details if "arch" in record.details else None
    kind = ["mixture-of-experts", "moe"] if record.num_experts else []
    base_model, relation = None, None
    if record.revision:  # `base_model` must be a hub name, so a local folder is left out
        base_model = record.source
        relation = "quantized" if gguf else "finetune"
    head = ModelCardData(
        base_model=base_model,
        base_model_relation=relation,
        library_name="gguf" if gguf else "transformers",
        pipeline_tag="text-generation",
        tags=["dotmoe", *kind, "gguf" if gguf else record.format],
    )
    splits = record.details.get("splits", [asdict(record) | {"target": "ffn"}])
    text = _TEMPLATES.get_template("card.md.jinja").render(
        r=record,
        head=head.to_yaml(),
        gguf=gguf,
        splits=[each | {"units": TARGETS[each["target"]].units_named} for each in splits],
        parameters=_figures("parameters", record.parameters),
        compared=_figures("comparison", record.verification_in_short()),
        results="\n\n".join(
            to_markdown(each) if isinstance(each, Table) else each for each in results
        ),
    )
    write_text(folder / CARD_FILE, text)


def _figures(what: str, values: dict[str, Any]) -> str:
    rows = [(name.replace("_", " "), figure(value)) for name, value in values.items()]
    return to_markdown(Table(columns=(what, "value"), rows=rows))
