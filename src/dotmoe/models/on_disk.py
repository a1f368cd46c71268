"""A Transformers model whose weights stay on disk: each part is read when it runs, then freed.

Parts are the decoder layers, and outside them each module with weights of its own: the embedding,
the last norm and the head. Memory holds one part at a time, except for small models.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from dotmoe.common.errors import UserError, VerificationError, one_line
from dotmoe.common.files import is_finite, read_json
from dotmoe.models.checkpoint import Tensors
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.meta_model import compute_constants, meta_model
from dotmoe.models.stock import read_stock

KEPT_BYTES = 2**28
"""Models with weights up to this size are kept in memory once they are read."""
_LAYER = re.compile(r"model\.layers\.(\d+)(?![^.])")
_PART = "part_on_disk"
"""Attribute of a module that is a part."""

Read = Callable[[str, Iterable[str]], Mapping[str, Tensor]]
"""Function from a part and its tensor names to the tensors, in the dtypes it computes in."""


def on_disk(
    dense: DenseModel,
    device: torch.device,
    dtype: torch.dtype,
    *,
    rounded_to: torch.dtype | None = None,
) -> DenseModel:
    """The same dense model, loaded or only described, with its weights left in its folder.

    It computes in `dtype`; weights are first rounded to `rounded_to`. Raises `UserError` at once if
    a tensor is missing or of another shape, and when a part runs if its weights are not finite.
    """
    tensors = Tensors.of(dense)
    model = empty_model(dense.config, device, dtype)
    tensors.require_model(model)

    def read(part: str, names: Iterable[str]) -> dict[str, Tensor]:
        weights = {
            name: tensors.read(f"{part}.{name}").to(device).to(rounded_to or dtype).to(dtype)
            for name in names
        }
        tensors.forget()
        return weights

    _read_when_run(model, read, dense.folder, UserError)
    return replace(dense, model=model, weights="disk")


@contextmanager
def _loading(place: str) -> Iterator[None]:
    """Within this context, what Transformers refuses to load is an export that is wrong."""
    try:
        yield
    except RuntimeError as error:
        if "memory" in str(error):
            raise  # the command line gives the remedy if memory runs out
        raise VerificationError(
            f"Transformers cannot load {place} ({one_line(error)}). Export again."
        ) from error


def exported_on_disk(folder: Path, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """An exported model in its Transformers class, with its weights left on disk.

    When a layer runs, Transformers loads a checkpoint of that layer, with tensors without storage
    for what lies outside the layers, so that it names, stacks and checks tensors itself. Raises
    `VerificationError` if it reports a tensor as missing or unknown.
    """
    plain = read_json(folder / "config.json")
    config = read_stock(AutoConfig, folder)
    tensors = Tensors(folder, tied=False)
    model = empty_model(config, device, dtype)
    layer_of = {name: _layer_of(name) for name in tensors.names}

    def load(layer: int | None) -> nn.Module:
        names = {
            name: _LAYER.sub("model.layers.0", name) if number == layer else name
            for name, number in layer_of.items()
            if number is None or number == layer or number >= config.num_hidden_layers
        }
        own = [name for name in names if layer is not None and layer_of[name] == layer]
        state = {names[name]: tensor for name, tensor in tensors.read_all(own)}
        nothing = torch.zeros((), dtype=dtype)
        for name in names.keys() - own:
            state[names[name]] = nothing.expand(tensors.describe(name)[0])
        options = {"config": type(config).from_dict(_with_one_layer(plain, layer)), "dtype": dtype}
        place = str(folder) if layer is None else f"layer {layer} of {folder}"
        with _loading(place):
            loaded, report = read_stock(
                type(model), None, state_dict=state, output_loading_info=True, **options
            )
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if report[problem]:
                raise VerificationError(
                    f"Transformers reports {problem} in {place}: {sorted(report[problem])[:3]}. "
                    "Update transformers, or choose another export format."
                )
        return cast(nn.Module, loaded)

    def read(part: str, names: Iterable[str]) -> dict[str, Tensor]:
        layer = _layer_of(part)
        if layer is None:
            weights = {name: tensors.read(f"{part}.{name}") for name in names}
        else:
            weights = load(layer).get_submodule("model.layers.0").state_dict()
            assert weights.keys() == set(names), part
        tensors.forget()
        return {name: weights.pop(name).to(device, dtype) for name in names}

    load(None)
    _read_when_run(model, read, folder, VerificationError)
    return model


def _layer_of(name: str) -> int | None:
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def _with_one_layer(plain: dict[str, Any], layer: int | None) -> dict[str, Any]:
    """Config of a model with one layer of the same kind as `layer`; None: without layers."""
    kept = [] if layer is None else [layer]
    changed: dict[str, Any] = {"num_hidden_layers": len(kept)}
    for key in ("layer_types", "no_rope_layers", "heads_of_experts"):
        if plain.get(key):
            changed[key] = [plain[key][index] for index in kept]
    for key in ("first_k_dense_replace", "first_dense_layers"):
        leading = plain.get(key)
        if leading:
            changed[key] = 1 if layer is not None and layer < leading else 0
    if plain.get("mlp_only_layers"):
        changed["mlp_only_layers"] = [0] if layer in plain["mlp_only_layers"] else []
    return plain | changed


def empty_model(config: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The stock model of a config, with a placeholder for each weight.

    A placeholder has the weight's shape, dtype and device, no storage, and the value NaN, so that
    a computation with a weight that was not read cannot pass for a result.
    """
    model: Any = meta_model(config, dtype)
    compute_constants(model, device)

    def placeholder(tensor: Tensor) -> Tensor:
        nan = torch.full((), math.nan, dtype=tensor.dtype, device=device)
        return nan.expand(tensor.shape) if tensor.is_meta else tensor

    model._apply(placeholder)
    model.tie_weights()
    return cast(nn.Module, model)


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The parts of a model by name, in the model's order."""
    return {
        name: module
        for name, module in model.named_modules()
        if _LAYER.fullmatch(name)
        or (not _LAYER.match(name) and next(module.parameters(recurse=False), None) is not None)
    }


def _read_when_run(model: nn.Module, read: Read, folder: Path, error: type[UserError]) -> None:
    """Make each part of an empty model read its weights before it runs and drop them after."""
    keeps = sum(parameter.nbytes for parameter in model.parameters()) <= KEPT_BYTES
    for name, module in parts_of(model).items():
        part = _Part(name, module, read, folder, error)
        module.register_forward_pre_hook(part.fill)
        module.register_forward_hook(part.empty, always_call=True)
        part.holders = 1 if keeps else 0
        setattr(module, _PART, part)


@contextmanager
def held_in_memory(module: nn.Module) -> Iterator[None]:
    """Within this context, a part of a model on disk has its weights in memory, to read or change.

    Changes are lost with it, unless the model is small enough to be kept in memory.
    """
    part: _Part = getattr(module, _PART)
    part.fill()
    part.holders += 1
    try:
        yield
    finally:
        part.holders -= 1
        part.empty()


class _Part:
    """A part that reads its weights before it runs and drops them after."""

    def __init__(
        self, name: str, module: nn.Module, read: Read, folder: Path, error: type[UserError]
    ) -> None:
        self._name = name
        self._read = read
        self._folder = folder
        self._error = error
        self._is_filled = False
        self.holders = 0
        """Number of those who need the weights after the part has run."""
        self._weights: dict[str, Tensor] = module.state_dict(keep_vars=True)
        self._placeholders = {key: weight.data for key, weight in self._weights.items()}

    def fill(self, *_: Any) -> None:
        if self._is_filled:
            return
        for key, tensor in self._read(self._name, self._weights).items():
            if not is_finite(tensor):
                where = f"{self._name}.{key} in {self._folder}"
                raise self._error(f"{where} contains NaN or infinity. Repair it.")
            self._weights[key].data = tensor
        self._is_filled = True

    def empty(self, *_: Any) -> None:
        if self.holders:
            return
        for key, weight in self._weights.items():
            weight.data = self._placeholders[key]
        self._is_filled = False
