"""k of an exported checkpoint, changed in place."""

import json
import os
from pathlib import Path

from dotmoe.checkpoint_folder import json_object
from dotmoe.errors import UserError
from dotmoe.export.intact import CONFIG_FILE, require_config
from dotmoe.export.model_card import card_text
from dotmoe.export.record import RECORD_FILE, ExportRecord
from dotmoe.export.staging import DISK_FULL, full_disk

CARD_FILE = "README.md"


def set_active_experts(folder: Path, active_experts: int) -> ExportRecord:
    """Change how many experts of an exported folder run; its weights stay as they are.

    `config.json`, which alone decides what a runtime does, is replaced last and in one step: a
    process that is killed leaves a model with the old k or one with the new, and the same call
    finishes what it left. After an error in the course of it all files are the old ones. The
    card's perplexities, measured with the old k, are left out of the new one.

    Args:
        folder: An export of `dotmoe.export.export`.
        active_experts: k, 1 to E.

    Returns:
        The new record.

    Raises:
        UserError: No such export, it is damaged, its weights depend on k, k out of range, or a full
            disk.
    """
    record = ExportRecord.load(folder)
    require_free_k(folder, record, active_experts)
    require_config(folder, record)
    config = json_object(folder / CONFIG_FILE)
    if record.active_experts_key not in config:
        raise UserError(
            f"{folder / CONFIG_FILE} lacks {record.active_experts_key}, where an export of "
            f"{record.format} holds k. Export again."
        )
    config[record.active_experts_key] = active_experts
    changed = record.with_active_experts(active_experts)
    _replace_all(
        folder,
        {
            CARD_FILE: card_text(changed),
            RECORD_FILE: changed.to_json(),
            CONFIG_FILE: json.dumps(config, indent=2) + "\n",
        },
    )
    return changed


def require_free_k(folder: Path, record: ExportRecord, active_experts: int) -> None:
    """Refuse a k that the weights of an export cannot be run with.

    Raises:
        UserError: k is out of range, or the weights depend on it.
    """
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


def _replace_all(folder: Path, texts: dict[str, str]) -> None:
    """Replace files in the given order; on an exception all of them are as before."""
    old = {
        name: (folder / name).read_bytes() if (folder / name).exists() else None for name in texts
    }
    replaced: list[str] = []
    try:
        for name, text in texts.items():
            _write(_beside(folder, name), text.encode())
        for name in texts:
            os.replace(_beside(folder, name), folder / name)
            replaced.append(name)
    except BaseException as error:
        for name in texts:
            _beside(folder, name).unlink(missing_ok=True)
        for name in replaced:
            _restore(folder, name, old[name])
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise full_disk(folder, error) from error
        raise


def _restore(folder: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (folder / name).unlink()
        return
    _write(_beside(folder, name), content)
    os.replace(_beside(folder, name), folder / name)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _beside(folder: Path, name: str) -> Path:
    return folder / f".{name}.partial"
