"""How precise products of float32 matrices are."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

_MATMUL: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]


@contextmanager
def in_float32() -> Iterator[None]:
    """Within this context, float32 products are float32 throughout: no TF32, bfloat16 or autocast.

    A user or a library may have allowed these for the whole process. Also decorates functions.
    """
    with _products("highest"), ExitStack() as changed:
        _leave_autocast(changed)
        yield


@contextmanager
def torch_as_usual() -> Iterator[None]:
    """Within this context, torch is as in a new process, whatever a program has set.

    New tensors are float32 and on the CPU, gradients are recorded, and there is no autocast.
    """
    with ExitStack() as changed:
        changed.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        changed.enter_context(torch.inference_mode(False))
        changed.enter_context(torch.enable_grad())
        if torch.get_default_device().type != "cpu":
            changed.enter_context(torch.device("cpu"))
        _leave_autocast(changed)
        yield


def _leave_autocast(changed: ExitStack) -> None:
    """Switch autocast off until the stack is closed."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            changed.enter_context(torch.autocast(device, enabled=False))


@in_float32()
def product_in_float32(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product, at least in float32: so are sums and result for 16-bit factors."""
    if left.dtype not in (torch.bfloat16, torch.float16):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


@contextmanager
def in_fast_products() -> Iterator[None]:
    """Within this context, factors of float32 products may be rounded where that is faster.

    To TF32 on GPUs, to bfloat16 on CPUs that multiply it in hardware: cuBLAS and oneDNN know where.
    Sums stay float32, and so does what runs within `in_float32`. Also decorates functions.
    """
    with _products("medium"):
        yield


@contextmanager
def _products(precision: str) -> Iterator[None]:
    """Within this context, torch has this precision of float32 products, by both of its names."""
    before = [backend.fp32_precision for backend in _MATMUL]
    name = ""
    with suppress(RuntimeError):  # torch does not tell once `fp32_precision` of a backend was set
        name = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        if name:
            torch.set_float32_matmul_precision(name)
        for backend, own in zip(_MATMUL, before, strict=True):
            backend.fp32_precision = own
