"""What other libraries' failures mean to a user, and their chatter kept away from him."""

import errno
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Inside, Transformers shows neither bars nor warnings; what matters we say ourselves."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    transformers_logging.disable_progress_bar()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def message_of(error: Exception) -> str | None:
    """One line for a failure that a user can cause or mend; None for a defect."""
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"out of GPU memory ({error}). Lower --micro-batch-size or --seq-len, or give "
            "--activation-checkpointing."
        )
    if isinstance(error, OSError | SafetensorError | RuntimeError):
        return _trouble_of_the_disk(error)
    return None


def _trouble_of_the_disk(error: Exception) -> str | None:
    """What to tell of a write that found no room or no permission; None for any other error."""
    cause: BaseException | None = error
    while cause is not None:
        # safetensors reports the number of the system's error only within its text
        in_text = re.search(r"os error (\d+)", str(cause))
        number = int(in_text[1]) if in_text else getattr(cause, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return f"the disk is full ({cause}). Free space, then run the same command again."
        if number in (errno.EACCES, errno.EPERM, errno.EROFS):
            return f"{cause}. Get permission, or choose another folder."
        cause = cause.__cause__ or cause.__context__
    return None
