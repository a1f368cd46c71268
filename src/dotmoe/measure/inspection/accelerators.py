"""Machines to plan for: this one, measured, and GPU types as their vendors describe them."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.benchmark import Timer

from dotmoe.common.device import memory_of
from dotmoe.measure.inspection.sizes import FLOAT32
from dotmoe.models.checkpoint import dtype_name

LINK_SHARE = 0.7
"""Share of a link's rate that collectives are assumed to reach."""


class Efficiency(NamedTuple):
    """Shares of a device's rates that a step reaches, and passes of its operations over memory.

    `width` and `neurons` count passes of a layer's forward (masks and routers included),
    `vocabulary` those of the distillation loss and its gradient over the logits of a token.
    """

    products: float
    moved: float
    width: int
    neurons: int
    vocabulary: int


ON_CPU = Efficiency(products=0.95, moved=0.65, width=31, neurons=13, vocabulary=44)
"""Efficiency of CPUs, fitted to measured steps."""
ON_GPU = Efficiency(products=0.65, moved=0.75, width=56, neurons=9, vocabulary=60)
"""Efficiency of GPUs, assumed, not measured; passes are those of the operations without fusion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """A machine to plan for: this one, measured, or a GPU type as its vendor describes it.

    Rates are those of matrix products in `dtype` (measured on large ones, or the dense tensor-core
    peak), in float32 and float64 (0: as in `dtype`), and of memory reads and writes; that of a link
    to the other GPUs (NVLink, or PCIe) is for one direction; processes of one CPU need none.
    """

    name: str
    dtype: str = "bfloat16"
    flops_per_s: float
    single_flops_per_s: float = 0
    double_flops_per_s: float = 0
    bytes_per_s: float
    memory_bytes: int = 0
    link_bytes_per_s: float = math.inf
    on_cpu: bool = False
    origin: str = "quoted"
    gpus: int = 1
    """Number of such devices on its node."""

    @property
    def place(self) -> dict[str, Any]:
        """Which devices these are, as JSON values."""
        return {"gpu": self.name, "gpus": self.gpus, "origin": self.origin}

    @property
    def efficiency(self) -> Efficiency:
        """The share of its rates that a step reaches."""
        return ON_CPU if self.on_cpu else ON_GPU

    def computing_in(self, dtype: str) -> "Accelerator":
        """This machine as it computes in that dtype; `auto` and 16 bits: as it is."""
        if dtype != "float32":
            return self
        return replace(self, dtype=dtype, flops_per_s=self.single_flops_per_s)

    @property
    def cache_bytes(self) -> int:
        """Bytes moved when a token reads one entry of the keys and values of a query's head.

        On a CPU fitted to measured steps, where 16 bits are slower; on a GPU three passes, assumed.
        """
        if self.on_cpu:
            return 10 if self.weight_bytes == FLOAT32 else 22
        return 3 * self.weight_bytes

    @property
    def link(self) -> float:
        """Bytes per second that a collective between GPUs is assumed to reach."""
        return LINK_SHARE * self.link_bytes_per_s

    @property
    def weight_bytes(self) -> Literal[2, 4]:
        """Bytes of a dense weight in its memory."""
        return 4 if self.dtype == "float32" else 2


class _DataSheet(NamedTuple):
    """What the vendor of a GPU type states."""

    bfloat16_tflops: float
    """TFLOP/s of products."""
    float32_tflops: float
    float64_tflops: float
    memory_gb: int
    memory_tb_per_s: float
    link_gb_per_s: float

    def accelerator(self, name: str) -> Accelerator:
        return Accelerator(
            name=f"{name.upper()} {self.memory_gb} GB",
            flops_per_s=self.bfloat16_tflops * 1e12,
            single_flops_per_s=self.float32_tflops * 1e12,
            double_flops_per_s=self.float64_tflops * 1e12,
            bytes_per_s=self.memory_tb_per_s * 1e12,
            memory_bytes=self.memory_gb * 10**9,
            link_bytes_per_s=self.link_gb_per_s * 1e9,
        )


_DATA_SHEETS = {
    "a100": _DataSheet(312, 19.5, 19.5, 80, 2.039, 300),
    "h100": _DataSheet(989, 67, 67, 80, 3.35, 450),
    "h200": _DataSheet(989, 67, 67, 141, 4.8, 450),
    "b200": _DataSheet(2_250, 75, 37, 180, 8, 900),
    "l40s": _DataSheet(362, 91.6, 1.4, 48, 0.864, 32),
}
ACCELERATORS = {name: sheet.accelerator(name) for name, sheet in _DATA_SHEETS.items()}
"""GPU types by vendors' data."""


def measured_here(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.3) -> Accelerator:
    """This machine, measured by matrix products and memory copies, for about `seconds` each."""
    on_cpu = device.type == "cpu"
    width = 512 if on_cpu else 8_192
    entries = 1 << 24 if on_cpu else 1 << 28
    # Varied entries: a GPU multiplies constants faster than it would real data.
    matrix = torch.linspace(-1, 1, width * width, device=device).view(width, width)
    source = torch.zeros(entries, device=device)
    names = {"a": matrix.to(dtype), "x": source, "y": torch.empty_like(source)}
    names |= {"single": matrix, "double": matrix.double()}
    product_s, single_s, double_s, copy_s = (
        Timer(statement, globals=names, num_threads=torch.get_num_threads())
        .blocked_autorange(min_run_time=seconds)
        .mean
        for statement in ("a @ a", "single @ single", "double @ double", "y.copy_(x)")
    )
    return Accelerator(
        name="this CPU" if on_cpu else torch.cuda.get_device_name(device),
        dtype=dtype_name(dtype),
        flops_per_s=2 * width**3 / product_s,
        single_flops_per_s=2 * width**3 / single_s,
        double_flops_per_s=2 * width**3 / double_s,
        bytes_per_s=2 * source.nbytes / copy_s,
        memory_bytes=memory_of(device),
        on_cpu=on_cpu,
        origin="measured",
    )
