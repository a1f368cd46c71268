"""A Transformers model whose weights stay on disk: each part is read when it runs, then let go.

Parts are the decoder layers, and outside them each module with weights of its own: the embedding,
the last norm and the head. Memory never holds the weights of more than one part, except of models
so small that reading them once and keeping them is the better bargain.
"""

import copy
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dotmoe.artifacts import DenseModel
from dotmoe.errors import UserError
from dotmoe.export.dense_tensors import DenseTensors
from dotmoe.parameters import compute_constants

KEPT_BYTES = 2**28
"""Models with weights up to this size are kept in memory once they are read."""

_LAYER = re.compile(r"model\.layers\.\d+(?![^.])")


class WeightSource(Protocol):
    """Where the weights of a part come from."""

    def read(self, part: str, names: Iterable[str]) -> Mapping[str, Tensor]:
        """The tensors of a part by their names within it, in the dtypes in which it computes."""
        ...


class DenseWeights:
    """Weights from the files of a dense checkpoint."""

    def __init__(
        self,
        tensors: DenseTensors,
        device: torch.device,
        dtype: torch.dtype,
        rounded_to: torch.dtype | None = None,
    ) -> None:
        self._tensors = tensors
        self._device = device
        self._dtype = dtype
        self._rounded_to = rounded_to or dtype
        self._known: set[str] = set()

    def read(self, part: str, names: Iterable[str]) -> dict[str, Tensor]:
        """See `WeightSource.read`.

        Raises:
            UserError: A weight is missing, or not finite.
        """
        weights = {name: self._read(f"{part}.{name}") for name in names}
        self._tensors.forget()
        return weights

    def _read(self, name: str) -> Tensor:
        stored = self._tensors.read(name).to(self._device)
        if name not in self._known and not is_finite(stored):
            raise UserError(
                f"{name} in {self._tensors.folder} contains NaN or infinity. Repair it."
            )
        self._known.add(name)
        return stored.to(self._rounded_to).to(self._dtype)


def on_disk(
    dense: DenseModel,
    device: torch.device,
    dtype: torch.dtype | Literal["auto"],
    *,
    rounded_to: torch.dtype | None = None,
) -> DenseModel:
    """The same dense model with its weights left in its folder.

    Args:
        dense: A dense model; only what it says of itself is used, so its weights may be on the meta
            device.
        device: Where to compute.
        dtype: In which dtype to compute; auto: that of the stored FFNs.
        rounded_to: Dtype to round weights to before that; None: none.

    Raises:
        UserError: The folder lacks a tensor, or has one of another shape.
    """
    tensors = DenseTensors.of(dense)
    if dtype == "auto":
        _, dtype = tensors.describe(dense.family.ffn_tensor(0, "gate"))
    model = empty_model(dense.config, device, dtype)
    for name, parameter in model.named_parameters():
        shape, _ = tensors.describe(name)
        if shape != tuple(parameter.shape):
            raise UserError(
                f"{name} has shape {shape} in {tensors.folder}, but its config.json asks for "
                f"{tuple(parameter.shape)}. Mend the config."
            )
    read_when_run(model, DenseWeights(tensors, device, dtype, rounded_to))
    return replace(dense, model=model)


def is_on_disk(model: nn.Module) -> bool:
    """Whether a model has placeholders for weights."""
    return any(
        parameter.numel() > 1 and not any(parameter.stride()) for parameter in model.parameters()
    )


def is_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite; needs no memory of the tensor's size."""
    return all(math.isfinite(end) for end in map(float, tensor.aminmax()))


def empty_model(config: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The stock model of a config, with a placeholder for each weight.

    A placeholder has the shape, dtype and device of the weight, no storage, and NaN as its value:
    what is computed with a weight that was not read cannot pass for a result.
    """
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    compute_constants(model, device)
    made: dict[Tensor, nn.Parameter] = {}  # tied weights stay tied
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                empty = _placeholder(parameter, device)
                made[parameter] = nn.Parameter(empty, requires_grad=False)
            setattr(module, name, made[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, name, _placeholder(buffer, device))
    return model.eval()


def read_when_run(model: nn.Module, source: WeightSource) -> None:
    """Make each part of an empty model read its weights before it runs and drop them after."""
    keeps = sum(parameter.nbytes for parameter in model.parameters()) <= KEPT_BYTES
    for name, module in parts_of(model).items():
        _Part(name, module, source, keeps=keeps)


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The parts by name, in the order in which the model lists them."""
    return {
        name: module
        for name, module in model.named_modules()
        if _LAYER.fullmatch(name)
        or (not _LAYER.match(name) and next(module.parameters(recurse=False), None) is not None)
    }


class _Part:
    """Fills the weights of a module while it runs."""

    def __init__(self, name: str, module: nn.Module, source: WeightSource, *, keeps: bool) -> None:
        self._name = name
        self._source = source
        self._is_filled = False
        # The tensors themselves, by their first names: an FFN may be wrapped afterwards.
        self._weights: dict[str, Tensor] = module.state_dict(keep_vars=True)
        self._placeholders = {key: weight.data for key, weight in self._weights.items()}
        module.register_forward_pre_hook(self._fill)
        if not keeps:
            module.register_forward_hook(self._empty, always_call=True)

    def _fill(self, module: nn.Module, arguments: Any) -> None:
        if self._is_filled:
            return
        for key, tensor in self._source.read(self._name, self._weights).items():
            self._weights[key].data = tensor
        self._is_filled = True

    def _empty(self, module: nn.Module, arguments: Any, output: Any) -> None:
        for key, weight in self._weights.items():
            weight.data = self._placeholders[key]
        self._is_filled = False


def _placeholder(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.full((), math.nan, dtype=tensor.dtype, device=device).expand(tensor.shape)
