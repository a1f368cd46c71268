"""The device that computes, and its memory."""

import os
import re

import torch

from dotmoe.common.cgroups import memory_limit
from dotmoe.common.errors import UserError, one_line


def resolved_device(name: str) -> torch.device:
    """The device that `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N` means here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", str(name)):
        raise UserError(f"device is {name!r}, but it must be auto, cpu, cuda or cuda:N. Name one.")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device is {name!r}, which this machine does not have ({one_line(error)[:160]}). "
            f"{_devices_here()}"
        ) from error
    return torch.device(name)


def _devices_here() -> str:
    """What to choose instead of a device that is not there."""
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if number == 0:
        return (
            "No GPU with CUDA is found here. Choose cpu, or install a build of torch for your GPU."
        )
    return f"Choose cpu, or cuda:0 to cuda:{number - 1}."


def memory_of(device: torch.device) -> int:
    """Bytes of memory: of the GPU; for the CPU of this machine, or of this process's container."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(whole, memory_limit() or whole)


def has_room(device: torch.device, num_bytes: int) -> bool:
    """Whether so many bytes take at most half of a GPU's free memory; False for other devices."""
    if device.type != "cuda":
        return False
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2 * num_bytes <= torch.cuda.mem_get_info(device)[0] + unused
