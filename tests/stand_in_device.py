"""A device that is not the CPU, for machines without one: it computes there, but never mixes.

A tensor of the device wraps one of the CPU, with its values. An operator that takes tensors of both
raises, as on CUDA. NCCL and FSDP2 know no such device.
"""

import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves, tree_map, tree_map_only

import dotmoe

PACKAGE = str(Path(dotmoe.__file__).parent)
"""Folder of the package, whatever folder the tests are in is called."""
DEVICE = torch.device("lazy", 0)  # the one kind whose gradients torch computes without a driver
COPIES = {"aten::copy_", "aten::_to_copy"}
INDEXING = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"}
"""Operators that take indices of the host if what they index is on the device."""
UNORDERED = {"aten::index_add", "aten::index_add_"}
"""Operators that add in another order each time on CUDA, so that a seed does not fix the result."""
WAITING = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::bincount",
    "aten::masked_select",
    "aten::equal",
    "aten::is_nonzero",
    "aten::_unique2",
    "aten::unique_consecutive",
}
"""Operators whose result's value or shape the host waits for on CUDA."""


class Crossing(NamedTuple):
    """An operator that takes something from the host to the device, or back."""

    operator: str
    function: str
    """The innermost function of dotmoe that runs, as `file.function`."""
    waits: bool
    """Whether the host waits for the device: for a number, a shape or a copy to the host."""


_crossings = list[Crossing]()


class StandInTensor(torch.Tensor):
    """A tensor of the device; `held` has its values."""

    @staticmethod
    def __new__(cls, held):
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(
            cls, held.size(), dtype=held.dtype, device=DEVICE, **layout
        )

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.tolist:
            return args[0].cpu().tolist()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs or {})
        if func is torch.Tensor.data.__set__:
            args[0].held = args[1].held
        return result

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _computed(func, args, kwargs or {})


@contextmanager
def stand_in_device():
    """Within this context the device exists; yields it."""
    real = torch.autocast

    def autocast(device_type, **options):
        return nullcontext() if device_type == DEVICE.type else real(device_type, **options)

    module = patch("torch.lazy", SimpleNamespace(device=nullcontext), create=True)
    fused = patch("torch.optim.adam._device_dtype_check_for_fused", lambda *rest: None)
    with module, fused, patch("torch.autocast", autocast), _Everywhere():
        torch._C._set_only_lift_cpu_tensors(True)  # so `torch.tensor(..., device=)` is a copy
        try:
            yield DEVICE
        finally:
            torch._C._set_only_lift_cpu_tensors(False)


@contextmanager
def crossings():
    """Within this context, collects every `Crossing` into the list that it yields."""
    _crossings.clear()
    yield _crossings


def _waits_for(name, args, kwargs):
    if name in WAITING:
        return True
    if name in INDEXING:
        return any(each is not None and each.dtype == torch.bool for each in args[1])
    if name == "aten::copy_":
        return not isinstance(args[0], StandInTensor) and isinstance(args[1], StandInTensor)
    return name == "aten::_to_copy" and torch.device(kwargs.get("device") or DEVICE).type == "cpu"


def _caller():
    """The innermost function of dotmoe that runs."""
    frame = sys._getframe()
    while frame and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    if frame is None:
        return "another"
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"


class _Everywhere(TorchDispatchMode):
    """For operators without a tensor of the device among their arguments."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _computed(func, args, kwargs or {})


def _computed(func, args, kwargs):
    tensors = [each for each in arg_tree_leaves(*args, **kwargs) if isinstance(each, torch.Tensor)]
    away = [each for each in tensors if isinstance(each, StandInTensor)]
    here = [each for each in tensors if not isinstance(each, StandInTensor) and each.dim()]
    name = func._schema.name
    waits = bool(away) and _waits_for(name, args, kwargs)
    crosses = waits or bool(away and here)
    if name in INDEXING and isinstance(args[0], StandInTensor):
        here = [each for each in here if each.dtype not in (torch.int64, torch.bool)]
    if away and here and name not in COPIES:
        raise RuntimeError(f"{func} mixes a device and the host")
    if away and name in UNORDERED:
        raise RuntimeError(f"{func} adds in no fixed order")
    goes = bool(away)
    if kwargs.get("device") is not None:
        goes = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs = kwargs | {"device": "cpu"} if goes else kwargs
    elif name == "aten::copy_":
        goes = isinstance(args[0], StandInTensor)
    if crosses or (name in COPIES and bool(away) != goes):
        _crossings.append(Crossing(name, _caller(), waits))
    args, kwargs = tree_map_only(StandInTensor, lambda each: each.held, (args, kwargs))
    known = {id(each.held): each for each in away}  # in-place operators return an argument

    def wrapped(value):
        if not goes or not isinstance(value, torch.Tensor):
            return value
        return known[id(value)] if id(value) in known else StandInTensor(value)

    return tree_map(wrapped, func(*args, **kwargs))
