"""JSON that carries the checksum of its own content, so that damage to it is noticed."""

import hashlib
import json
from pathlib import Path
from typing import Any

SEAL = "sha256"
"""Key of the checksum: of everything else in the object."""


class DamagedError(ValueError):
    """A sealed file is missing, or not as it was written; the text says which, with its path."""


def sealed(values: dict[str, Any]) -> str:
    """JSON text of an object with its checksum. A seal that it has already is made anew."""
    plain = json.loads(json.dumps(values))  # as it will be read: keys are text, tuples are lists
    return json.dumps({**plain, SEAL: _checksum(plain)}, indent=2) + "\n"


def unsealed(path: Path) -> dict[str, Any]:
    """The object that `sealed` wrote, without its checksum.

    Raises:
        DamagedError: The file is missing, no JSON object, without a seal, or altered.
    """
    values = any_object(path)
    if SEAL not in values:
        raise DamagedError(f"{path} has no checksum, so it is damaged or of an older dotmoe")
    require_seal(path, values)
    del values[SEAL]
    return values


def any_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, sealed or not.

    Raises:
        DamagedError: The file is missing or holds no whole JSON object.
    """
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DamagedError(f"{path} is truncated or altered: no JSON ({error})") from error
    if not isinstance(values, dict):
        raise DamagedError(f"{path} has been altered: no JSON object")
    return values


def require_seal(path: Path, values: dict[str, Any]) -> None:
    """Refuse an object, read from `path`, whose checksum is not that of its content.

    Raises:
        DamagedError: It has been altered.
    """
    if values.get(SEAL) != _checksum(values):
        raise DamagedError(f"{path} has been altered: its checksum is not that of its content")


def _checksum(values: dict[str, Any]) -> str:
    content = {key: value for key, value in values.items() if key != SEAL}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
