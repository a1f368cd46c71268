"""An exported folder loaded by stock Transformers one layer at a time, and run from disk."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from dotmoe.checkpoint_folder import dense_tensor_files, one_line
from dotmoe.export.verification_error import VerificationError
from dotmoe.export.weights_on_disk import empty_model, is_finite, read_when_run

_LAYER = re.compile(r"model\.layers\.(\d+)(?:\.|$)")


def exported_on_disk(folder: Path, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The exported model in the class that stock Transformers has for it, weights on disk.

    Raises:
        VerificationError: Transformers misses a tensor outside the layers, or does not know one.
            The tensors of a layer are looked at when it runs.
    """
    weights = ExportedWeights(folder, device, dtype)
    read_when_run(weights.model, weights)
    return weights.model


class ExportedWeights:
    """Weights of an exported folder, each layer through `from_pretrained`.

    Transformers gets them as a checkpoint of its own: everything outside the layers, and the one
    layer. So the naming, stacking and checking of a layer's tensors are all its work. What lies
    outside the layers it has looked at before, and finds under the names that its model has.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self._folder = folder
        self._device = device
        self._dtype = dtype
        self._plain: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self._config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self._files = dense_tensor_files(folder)
        self._finite: set[str] = set()
        self.model = empty_model(self._config, device, dtype)
        assert type(self.model).__module__.startswith("transformers."), type(self.model)
        self._load(None)

    def read(self, part: str, names: Iterable[str]) -> dict[str, Tensor]:
        """See `WeightSource.read`.

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
                if not is_finite(tensor):
                    raise VerificationError(
                        f"{part}.{name} in {self._folder} holds NaN or infinity. Check the dense "
                        "checkpoint."
                    )
            self._finite.add(part)
        return {name: tensor.to(self._device) for name, tensor in weights.items()}

    def _load(self, layer: int | None) -> nn.Module:
        """A model of the one layer, or of none, as stock Transformers loads it."""
        place = self._folder if layer is None else f"layer {layer} of {self._folder}"
        with _no_progress_bar():
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
            return cast(Tensor, file.get_tensor(name))

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
                    loaded_as = _LAYER.sub("model.layers.0.", name) if is_layer else name
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


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    had_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bar:
            transformers_logging.enable_progress_bar()
