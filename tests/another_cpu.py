"""A simulated CPU whose matrix products round otherwise: `make test OTHER_CPU=SEED`.

CPUs sum the terms of a product in different orders, and some round the factors of float32
products to bfloat16 where a program allows it: oneDNN with AMX does so for some shapes. Tests hold
on all of them. Here a seed chooses the order, and the shapes whose factors are rounded. Equal
inputs give equal bits, as on any one CPU.

Forks of the main thread compute so too, other threads and fresh processes do not; nor do fused
attention and convolutions.
"""

import os
from functools import cache
from random import Random

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_RANDPERM = torch.randperm
"""Bound here: a test may watch what dotmoe draws."""

aten = torch.ops.aten
FIRST_FACTOR = {
    **dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten.dot, aten._grouped_mm), 0),
    **dict.fromkeys((aten.addmm, aten.addmm_, aten.baddbmm, aten.baddbmm_, aten.addmv), 1),
}
"""Place of the left factor among the arguments of each product; the right one follows it."""


class OtherCpu(TorchDispatchMode):
    """Within this context, matrix products on the CPU round as the seed has it."""

    def __init__(self, seed):
        super().__init__()
        self.seed = seed
        self.order_of = cache(self._order_of)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # the products of its local tensors come here
        product = func.overloadpacket
        first = FIRST_FACTOR.get(product)
        if first is not None:
            factors = args[first : first + 2]
            if all(is_plain(factor) for factor in factors):
                factors = self.in_other_order(product, *self.rounded(*factors))
                args = (*args[:first], *factors, *args[first + 2 :])
        return func(*args, **kwargs or {})

    def rounded(self, left, right):
        """Both factors, in bfloat16 if the program allows it and the seed rounds these shapes."""
        is_allowed = torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        if is_allowed and left.dtype == torch.float32 and self.draw(left.shape, right.shape) % 2:
            return left.bfloat16().float(), right.bfloat16().float()
        return left, right

    def in_other_order(self, product, left, right):
        """Both factors, with the inner dimension in another order."""
        if product is aten._grouped_mm and right.dim() == 2:
            return left, right  # sums go over groups of rows, which the order would mix
        order = self.order_of(left.shape[-1])
        rows = -2 if right.dim() > 1 else 0
        return left.index_select(-1, order), right.index_select(rows, order)

    def draw(self, *what):
        """A number that the seed gives to this."""
        return Random(repr((self.seed, *what))).getrandbits(32)

    def _order_of(self, size):
        return _RANDPERM(size, generator=torch.Generator().manual_seed(self.draw(size)))


def is_plain(tensor):
    """Whether these are floating-point numbers in this machine's memory."""
    is_ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_ordinary and tensor.device.type == "cpu" and tensor.is_floating_point()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Fixtures compute on that CPU too."""
    with OtherCpu(int(os.environ["OTHER_CPU"])):
        return (yield)


def pytest_report_header():
    return f"matrix products as on another CPU, seed {os.environ['OTHER_CPU']}"
