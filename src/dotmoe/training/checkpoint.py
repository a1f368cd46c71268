"""Save and restore the state of a run, so that killing it at any moment loses little."""

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from dotmoe.errors import UserError


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write to a temporary name, sync, rename: the file is the old one or the new one."""
    temporary = path.with_name(path.name + ".partial")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The state last saved, or None where there is none.

    Raises:
        UserError: The file is there but damaged.
    """
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} is damaged and cannot be resumed from. Delete it to start that stage again."
        ) from error
    return state
