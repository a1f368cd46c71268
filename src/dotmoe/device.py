"""Which device a name means on this machine."""

import re

import torch

from dotmoe.errors import UserError


def resolved_device(name: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:N` means here; auto: a GPU if there is one.

    Raises:
        UserError: Another name, or a device that this machine does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UserError(f"device is {name!r}, but it must be auto, cpu, cuda or cuda:N. Name one.")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        cause = " ".join(str(error).split())[:160]
        raise UserError(
            f"device is {name!r}, which this machine does not have ({cause}). "
            "Choose auto, cpu or cuda."
        ) from error
    return device
