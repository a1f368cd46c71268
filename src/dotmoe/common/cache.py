"""The user's folder for what can be made again: answers, fingerprints, models read from GGUF."""

import os
from pathlib import Path

from dotmoe.common.errors import UserError
from dotmoe.common.files import expanded

_OTHER_PLACE = "Name another place by the environment variable XDG_CACHE_HOME."


def cache_folder() -> Path:
    """The user's folder for what can be made again, `~/.cache/dotmoe`; it need not exist."""
    named = os.environ.get("XDG_CACHE_HOME")
    if named:
        return expanded(named) / "dotmoe"
    try:
        return Path.home() / ".cache/dotmoe"
    except RuntimeError as error:
        raise UserError(
            f"this user has no home folder, where what can be used again is kept. {_OTHER_PLACE}"
        ) from error


def cached_in(name: str = "") -> Path:
    """A folder below `cache_folder`, made if it is missing, in which files can be written.

    Raises `UserError` where that cannot be.
    """
    folder = cache_folder() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be made ({error.strerror}), but what can be used again is kept "
            f"there. {_OTHER_PLACE}"
        ) from error
    if not os.access(folder, os.W_OK):
        raise UserError(
            f"{folder} cannot be written, but what can be used again is kept there. {_OTHER_PLACE}"
        )
    return folder
