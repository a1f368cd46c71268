"""k of an exported folder, changed in place."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from dotmoe.errors import UserError
from dotmoe.export.card import CARD_FILE, card_text
from dotmoe.export.format import Format
from dotmoe.export.record import CONFIG_FILE, RECORD_FILE, ExportRecord, require_config
from dotmoe.files import DISK_FULL, checksums, full_disk, read_json, write_text


def set_active_experts(folder: Path, active_experts: int, form: Format) -> ExportRecord:
    """Change how many experts of an exported folder run; its weights stay as they are.

    What decides what a runtime does is replaced last and in one step: a process that is killed
    leaves a model with the old k or one with the new, and the same call finishes what it left.
    After an error in the course of it all files are the old ones. The card's perplexities, measured
    with the old k, are left out of the new one.

    Args:
        folder: An export.
        active_experts: k, 1 to E.
        form: Its format.

    Returns:
        The new record.

    Raises:
        UserError: No such export, it is damaged, its weights depend on k, k out of range, or a full
            disk.
    """
    record = ExportRecord.load(folder)
    require_free_k(folder, record, active_experts)
    if record.config_sha256 is not None:
        require_config(folder, record)
        if record.active_experts_key not in read_json(folder / CONFIG_FILE):
            raise UserError(
                f"{folder / CONFIG_FILE} lacks {record.active_experts_key}, where an export of "
                f"{record.format} holds k. Export again."
            )
    new, path = form.with_active_experts(folder, active_experts)
    changed = record.with_active_experts(active_experts)
    if path.name in record.checksums:
        sums = checksums(folder, [new.name])
        changed = replace(changed, checksums=record.checksums | {path.name: sums[new.name]})
    with _restored_on_error(folder / CARD_FILE, folder / RECORD_FILE):
        write_text(folder / CARD_FILE, card_text(changed))
        write_text(folder / RECORD_FILE, changed.to_json())
        new.replace(path)
    return changed


@contextmanager
def _restored_on_error(*paths: Path) -> Iterator[None]:
    """On an exception files become what they were before, which takes no room on the disk."""
    old = {path: path.with_name(f".{path.name}.old") for path in paths}
    for path, kept in old.items():
        kept.unlink(missing_ok=True)  # left by a process that was killed
        if path.exists():
            os.link(path, kept)
    try:
        yield
    except BaseException as error:
        for path, kept in old.items():
            if kept.exists():
                kept.replace(path)
            else:
                path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise full_disk(path.parent, error) from error
        raise
    finally:
        for kept in old.values():
            kept.unlink(missing_ok=True)


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
