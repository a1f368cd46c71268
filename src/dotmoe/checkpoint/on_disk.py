"""A Transformers model whose weights stay on disk: each part is read when it runs, then let go.

Parts are the decoder layers, and outside them each module with weights of its own: the embedding,
the last norm and the head. Memory never holds the weights of more than one part, except of models
so small that reading them once and keeping them is the better bargain.
"""

import copy
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from dotmoe.checkpoint.folder import tensor_files
from dotmoe.checkpoint.tensors import Tensors
from dotmoe.errors import UserError, VerificationError, one_line
from dotmoe.models.dense import DenseModel
from dotmoe.parameters import compute_constants

KEPT_BYTES = 2**28
"""Models with weights up to this size are kept in memory once they are read."""

_LAYER = re.compile(r"model\.layers\.(\d+)(?![^.])")

Read = Callable[[str, Iterable[str]], Mapping[str, Tensor]]
"""The tensors of a part by their names within it, in the dtypes in which it computes."""


def on_disk(
    dense: DenseModel,
    device: torch.device,
    dtype: torch.dtype | Literal["auto"],
    *,
    rounded_to: torch.dtype | None = None,
    tensors: Tensors | None = None,
) -> DenseModel:
    """The same dense model with its weights left in its folder.

    Args:
        dense: A dense model; only what it says of itself is used, so its weights may be on the meta
            device.
        device: Where to compute.
        dtype: In which dtype to compute; auto: that of the stored FFNs.
        rounded_to: Dtype to round weights to before that; None: none.
        tensors: Where to read weights; None: in the files of its folder.

    Raises:
        UserError: The folder lacks a tensor, or has one of another shape.
    """
    tensors = tensors or Tensors.of(dense)
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
    known: set[tuple[str, str]] = set()

    def read(part: str, names: Iterable[str]) -> dict[str, Tensor]:
        weights = {}
        for name in names:
            stored = tensors.read(f"{part}.{name}").to(device)
            if (part, name) not in known:
                _require_finite(stored, f"{part}.{name}", tensors.folder, UserError)
                known.add((part, name))
            weights[name] = stored.to(rounded_to or dtype).to(dtype)
        tensors.forget()
        return weights

    _read_when_run(model, read)
    return replace(dense, model=model)


def exported_on_disk(folder: Path, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The exported model in the class that stock Transformers has for it, weights on disk.

    Raises:
        VerificationError: Transformers misses a tensor outside the layers, or does not know one.
            The tensors of a layer are looked at when it runs.
    """
    weights = _ExportedWeights(folder, device, dtype)
    _read_when_run(weights.model, weights.read)
    return weights.model


class _ExportedWeights:
    """Weights of an exported folder, each layer through `from_pretrained`.

    Transformers gets them as a checkpoint of its own: everything outside the layers, and the one
    layer. So the naming, stacking and checking of a layer's tensors are all its work. What lies
    outside the layers it has looked at before, and finds under the names that its model has.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self._folder, self._device, self._dtype = folder, device, dtype
        self._plain: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self._config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self._files = tensor_files(folder)
        self._finite: set[str] = set()
        self.model = empty_model(self._config, device, dtype)
        assert type(self.model).__module__.startswith("transformers."), type(self.model)
        self._load(None)

    def read(self, part: str, names: Iterable[str]) -> dict[str, Tensor]:
        """See `Read`.

        Raises:
            VerificationError: A tensor is missing, unknown to Transformers, or not finite.
        """
        layer = _layer_of(part)
        if layer is None:
            weights = {name: self._stored(f"{part}.{name}") for name in names}
        else:
            weights = self._load(layer).get_submodule("model.layers.0").state_dict()
            assert weights.keys() == set(names), part
        if part not in self._finite:
            for name, tensor in weights.items():
                _require_finite(tensor, f"{part}.{name}", self._folder, VerificationError)
            self._finite.add(part)
        return {name: tensor.to(self._device) for name, tensor in weights.items()}

    def _load(self, layer: int | None) -> nn.Module:
        """A model of the one layer, or of none, as stock Transformers loads it."""
        place = self._folder if layer is None else f"layer {layer} of {self._folder}"
        with quiet_transformers():
            try:
                model, report = cast(Any, type(self.model)).from_pretrained(
                    None,
                    config=type(self._config).from_dict(_with_one_layer(self._plain, layer)),
                    state_dict=dict(self._tensors(layer)),
                    dtype=self._dtype,
                    output_loading_info=True,
                )
            except RuntimeError as error:
                raise VerificationError(
                    f"Transformers cannot load {place} ({one_line(error)}). Export again."
                ) from error
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if report[problem]:
                raise VerificationError(
                    f"Transformers reports {problem} in {place}: {sorted(report[problem])[:3]}. "
                    "Update transformers, or choose another export format."
                )
        return cast(nn.Module, model)

    def _stored(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor.to(self._dtype)

    def _tensors(self, layer: int | None) -> Iterator[tuple[str, Tensor]]:
        """Everything outside the layers, and one layer under the number 0; read when looked at."""
        last = self._config.num_hidden_layers - 1
        names_of: dict[Path, list[str]] = {}
        for name, path in self._files.items():
            number = _layer_of(name)
            if number is None or number > last or number == layer:
                names_of.setdefault(path, []).append(name)
        for path, names in names_of.items():
            with safe_open(path, framework="pt") as file:
                for name in names:
                    is_layer = layer is not None and _layer_of(name) == layer
                    loaded_as = _LAYER.sub("model.layers.0", name) if is_layer else name
                    yield loaded_as, file.get_tensor(name)


def _layer_of(name: str) -> int | None:
    match = _LAYER.match(name)
    return None if match is None else int(match[1])


def _with_one_layer(plain: dict[str, Any], layer: int | None) -> dict[str, Any]:
    """Config of a model whose only layer is of the kind of that one; None: without layers."""
    kept = [] if layer is None else [layer]
    changed: dict[str, Any] = {"num_hidden_layers": len(kept)}
    if plain.get("layer_types"):
        changed["layer_types"] = [plain["layer_types"][index] for index in kept]
    if "first_k_dense_replace" in plain:
        changed["first_k_dense_replace"] = sum(
            index < plain["first_k_dense_replace"] for index in kept
        )
    if "mlp_only_layers" in plain:
        changed["mlp_only_layers"] = [0] if layer in plain["mlp_only_layers"] else []
    return plain | changed


def is_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite; needs no memory of the tensor's size."""
    return all(math.isfinite(end) for end in map(float, tensor.aminmax()))


def _require_finite(tensor: Tensor, name: str, folder: Path, error: type[UserError]) -> None:
    if not is_finite(tensor):
        raise error(f"{name} in {folder} contains NaN or infinity. Repair the dense checkpoint.")


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


def _placeholder(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.full((), math.nan, dtype=tensor.dtype, device=device).expand(tensor.shape)


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The parts by name, in the order in which the model lists them."""
    return {
        name: module
        for name, module in model.named_modules()
        if _LAYER.fullmatch(name)
        or (not _LAYER.match(name) and next(module.parameters(recurse=False), None) is not None)
    }


def _read_when_run(model: nn.Module, read: Read) -> None:
    """Make each part of an empty model read its weights before it runs and drop them after."""
    keeps = sum(parameter.nbytes for parameter in model.parameters()) <= KEPT_BYTES
    for name, module in parts_of(model).items():
        _Part(name, module, read, keeps=keeps)


class _Part:
    """Fills the weights of a module while it runs."""

    def __init__(self, name: str, module: nn.Module, read: Read, *, keeps: bool) -> None:
        self._name = name
        self._read = read
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
        for key, tensor in self._read(self._name, self._weights).items():
            self._weights[key].data = tensor
        self._is_filled = True

    def _empty(self, module: nn.Module, arguments: Any, output: Any) -> None:
        for key, weight in self._weights.items():
            weight.data = self._placeholders[key]
        self._is_filled = False


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no load report of Transformers; afterwards as before."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
