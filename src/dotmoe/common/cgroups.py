"""The limit on memory that a container or a batch system sets for this process."""

from pathlib import Path

_FILES = {"": "memory.max", "memory": "memory.limit_in_bytes"}
"""File with the limit of a group: of version 2, whose only controller has no name, and of 1."""


def memory_limit(
    groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes of memory that this process may use by its control groups; None: no limit is known.

    The limit of a group holds for the groups below it, too, so the least of all counts. In a
    container the path of a group may not exist; its limit is then that of the mounted root.
    """
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux, or hidden
        return None
    limits = list[int]()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in _FILES:
                root = mounted / controller
                place = root / path.lstrip("/")
                for folder in (place, *place.parents):
                    if folder.is_relative_to(root):
                        limits += _limit_in(folder / _FILES[controller])
    return min(limits, default=None)


def _limit_in(file: Path) -> list[int]:
    """The limit that a file states, as one value; none for `max`, or if there is no such file."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return []
    return [int(text)] if text.isdigit() else []
