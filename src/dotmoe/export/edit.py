"""k of an exported folder, changed in place."""

from dataclasses import replace
from pathlib import Path

from dotmoe.errors import UserError
from dotmoe.export.architectures import formats_like
from dotmoe.export.card import CARD_FILE, card_text
from dotmoe.export.record import CONFIG_FILE, RECORD_FILE, ExportRecord, require_config
from dotmoe.files import checksums, read_json, write_text


def set_active_experts(folder: Path, active_experts: int) -> ExportRecord:
    """Change how many experts of an exported folder run; its weights stay as they are.

    What decides what a runtime does is replaced last and in one step: a process that is killed
    leaves a model with the old k or one with the new, and the same call finishes what it left.
    After an error in writing, such as a full disk, all files are the old ones. The card's
    perplexities, measured with the old k, are left out of the new one.

    Args:
        folder: An export.
        active_experts: k, 1 to E.

    Returns:
        The new record.

    Raises:
        UserError: No such export, it is damaged, its weights depend on k, or k out of range.
    """
    record = ExportRecord.load(folder)
    require_free_k(folder, record, active_experts)
    if record.config_sha256 is not None:
        require_config(folder, record)
        if record.active_experts_key not in read_json(folder / CONFIG_FILE):
            raise UserError(f"{folder / CONFIG_FILE} lacks {record.active_experts_key}.")
    changed = record.with_active_experts(active_experts)
    form = formats_like(record.format)[record.format]
    renamed: dict[Path, Path] = {}
    try:
        new, path = form.with_active_experts(folder, active_experts)
        renamed[new] = path
        if path.name in record.checksums:
            sums = checksums(folder, [new.name])
            changed = replace(changed, checksums=record.checksums | {path.name: sums[new.name]})
        texts = {CARD_FILE: card_text(changed), RECORD_FILE: changed.to_json()}
        for name, text in texts.items():
            written = folder / f".{name}.new"
            renamed = {written: folder / name} | renamed
            write_text(written, text)
        for written, place in renamed.items():  # needs no room, and the config comes last
            written.replace(place)
    finally:
        for written in renamed:
            written.unlink(missing_ok=True)
    return changed


def require_free_k(folder: Path, record: ExportRecord, active_experts: int) -> None:
    """Refuse a k that the weights of an export cannot be run with.

    Raises:
        UserError: k is out of range, or the weights depend on it.
    """
    if not record.num_experts:
        raise UserError(f"{folder} holds a dense model, which has no experts. Name a MoE.")
    if not 1 <= active_experts <= record.num_experts:
        raise UserError(
            f"active_experts is {active_experts}, but {folder} has {record.num_experts} experts a "
            f"layer. Choose 1 to {record.num_experts}."
        )
    if not record.active_experts_editable:
        raise UserError(
            f"k of {folder} is {record.active_experts} and cannot be changed: the weights of "
            f"{record.format} are made for it. Export the run again: dotmoe export RUN OUT "
            f"--format {record.format} --active-experts {active_experts}."
        )
