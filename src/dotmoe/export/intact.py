"""Whether an exported folder is still as it was written."""

import hashlib
import json
from pathlib import Path
from typing import Any

from dotmoe.checksums import FileSum, damage_in, damage_in_sizes, manifest_of
from dotmoe.errors import UserError
from dotmoe.export.record import RECORD_FILE, REMEDY, ExportRecord
from dotmoe.sealed_json import DamagedError, any_object

CONFIG_FILE = "config.json"
_MARKER = "finished/export"


def checksums_of(folder: Path) -> dict[str, FileSum]:
    """Size and SHA-256 of all files of a folder but its config, whose k may be changed."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = [path.relative_to(folder).as_posix() for path in files]
    return manifest_of(folder, [name for name in names if name != CONFIG_FILE])


def config_sha256(folder: Path, active_experts_key: str) -> str:
    """SHA-256 of what an exported folder's config says besides k."""
    config = _config(folder)
    config.pop(active_experts_key, None)
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def require_intact(folder: Path, *, read_weights: bool = True) -> None:
    """Refuse an exported folder of which a file is not as the export left it.

    A folder outside of a run that has no record passes, and one whose record is of a version that
    kept no checksums. The cost is that of SHA-256 over the checkpoint; wrong sizes are found first.

    Args:
        folder: A checkpoint folder.
        read_weights: False compares only the size of weight files, for who does not use them.

    Raises:
        UserError: A file is missing, truncated or altered, or k is not that of the record.
    """
    if not (folder / RECORD_FILE).is_file():
        if (folder.parent / _MARKER).exists():
            raise UserError(f"{folder / RECORD_FILE} is missing. {REMEDY}")
        return
    record = ExportRecord.load(folder)
    if not record.checksums:
        return
    sums = record.checksums
    read = {n: s for n, s in sums.items() if read_weights or not n.endswith(".safetensors")}
    damage = damage_in_sizes(folder, sums) or damage_in(folder, read)
    if damage is not None:
        raise UserError(f"{damage}. {REMEDY}")
    require_config(folder, record)
    active_experts = _config(folder).get(record.active_experts_key)
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
    expected = record.config_sha256
    if expected and config_sha256(folder, record.active_experts_key) != expected:
        raise UserError(
            f"{folder / CONFIG_FILE} has been altered: its SHA-256 without "
            f"{record.active_experts_key} is not that of what was written. {REMEDY}"
        )


def _config(folder: Path) -> dict[str, Any]:
    try:
        return any_object(folder / CONFIG_FILE)
    except DamagedError as error:
        raise UserError(f"{error}. {REMEDY}") from error
