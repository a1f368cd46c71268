"""GPU types to plan for: figures quoted from their vendors, none measured by us."""

from dataclasses import dataclass
from typing import Literal

GPUName = Literal["a100", "h100", "h200", "b200", "l40s"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """A GPU type for planning with bfloat16 weights."""

    name: str
    peak_flops_per_s: float
    """Dense bfloat16 tensor-core peak."""
    memory_bytes: int
    memory_bytes_per_s: float
    """Of its own memory."""
    link_bytes_per_s: float
    """To the other GPUs of its node, one direction: NVLink, or PCIe where there is none."""
    network_bytes_per_s: float
    """To other nodes, one direction: its share of the node's InfiniBand, as in vendors' systems."""
    origin: str = "quoted"


ACCELERATORS: dict[GPUName, Accelerator] = {
    "a100": Accelerator(
        name="A100 80 GB",
        peak_flops_per_s=312e12,
        memory_bytes=80 * 10**9,
        memory_bytes_per_s=2.039e12,
        link_bytes_per_s=300e9,
        network_bytes_per_s=25e9,
    ),
    "h100": Accelerator(
        name="H100 80 GB",
        peak_flops_per_s=989e12,
        memory_bytes=80 * 10**9,
        memory_bytes_per_s=3.35e12,
        link_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
    ),
    "h200": Accelerator(
        name="H200 141 GB",
        peak_flops_per_s=989e12,
        memory_bytes=141 * 10**9,
        memory_bytes_per_s=4.8e12,
        link_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
    ),
    "b200": Accelerator(
        name="B200 180 GB",
        peak_flops_per_s=2_250e12,
        memory_bytes=180 * 10**9,
        memory_bytes_per_s=8e12,
        link_bytes_per_s=900e9,
        network_bytes_per_s=50e9,
    ),
    "l40s": Accelerator(
        name="L40S 48 GB",
        peak_flops_per_s=362e12,
        memory_bytes=48 * 10**9,
        memory_bytes_per_s=864e9,
        link_bytes_per_s=32e9,
        network_bytes_per_s=25e9,
    ),
}
