"""One process at a time in a folder."""

import errno
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dotmoe.errors import UserError

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

LOCK = ".lock"
"""File whose lock stands for the folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder; the system takes the lock back after any end.

    Raises:
        UserError: Another process is at work in the folder.
    """
    if sys.platform == "win32":  # has no fcntl: runs are not kept apart
        yield
        return
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{folder} is being worked on by another dotmoe process. Wait for it, or choose "
                "another folder."
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            logger.warning("%s cannot be locked: start no second run in it", folder)
        yield
