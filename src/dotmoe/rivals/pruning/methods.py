"""The pruning methods by name, and `prune`, which writes what one of them leaves."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dotmoe.common.errors import UserError
from dotmoe.common.files import read_json, save_tensors, write_json
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.load import MODEL
from dotmoe.models.meta_model import num_parameters
from dotmoe.models.save import write_weights
from dotmoe.rivals.pruning import two_of_four
from dotmoe.rivals.pruning.by_curvature import k_obd, llm_surgeon, require_memory
from dotmoe.rivals.pruning.contract import Pruned, PruneInputs
from dotmoe.rivals.pruning.disp_llm import disp_llm
from dotmoe.rivals.pruning.llm_pruner import llm_pruner, require_separate_heads
from dotmoe.rivals.pruning.modegpt import modegpt, require_plain_heads
from dotmoe.rivals.pruning.slicegpt import require_norms_before, sliced, slicegpt
from dotmoe.rivals.pruning.whole_layers import shortgpt, sleb

PRUNING_METRICS, TENSORS = "pruning.json", "tensors.safetensors"
"""Files in the stage's folder: what `prune` returns, and tensors kept instead of a checkpoint."""


class Method(NamedTuple):
    """A published pruning method."""

    prune: Callable[[PruneInputs], Pruned]
    """Prunes the model in place."""
    require: Callable[[DenseModel, torch.device], None] = lambda dense, device: None
    """Raises a `UserError` if the method does not fit; see the function `require`."""
    is_fixed: bool = False
    """Whether the method removes the same at any budget."""
    is_trained: bool = False
    """Whether the method trains on training text, with a seed."""
    applied: Callable[..., AbstractContextManager[None]] | None = None
    """If no stock checkpoint holds the result: within this context the model uses `tensors`."""


PRUNING = {
    "magnitude_2_4": Method(two_of_four.magnitude, two_of_four.require, is_fixed=True),
    "wanda_2_4": Method(two_of_four.wanda, two_of_four.require, is_fixed=True),
    "sparsegpt_2_4": Method(two_of_four.sparsegpt, two_of_four.require, is_fixed=True),
    "pruner_zero_2_4": Method(two_of_four.pruner_zero, two_of_four.require, is_fixed=True),
    "slicegpt": Method(slicegpt, require_norms_before, applied=sliced),
    "llm_pruner": Method(llm_pruner, require_separate_heads),
    "modegpt": Method(modegpt, require_plain_heads),
    "disp_llm": Method(disp_llm, is_trained=True),
    "k_obd": Method(k_obd, require_memory),
    "llm_surgeon": Method(llm_surgeon, require_memory),
    "shortgpt": Method(shortgpt),
    "sleb": Method(sleb),
}
"""Pruning methods by command-line name; by names of `PRUNERS`."""


def require_prunable(method: str, dense: DenseModel, device: torch.device) -> None:
    """Raise a `UserError` if a method does not fit a model or the device that will hold it."""
    if dense.traits.has_own_decoder:
        raise UserError(
            f"{dense.config.model_type} has a decoder that no pruning method knows. Leave the "
            "method out."
        )
    PRUNING[method].require(dense, device)


@torch.no_grad()
def prune(method: str, inputs: PruneInputs, folder: Path) -> dict[str, Any]:
    """Prune a model by a method of `PRUNING`, to the wanted number of parameters if it can.

    `folder` receives `pruning.json`, and `model/`, a stock checkpoint in the dtype of the dense
    one, or instead of it `tensors.safetensors`.

    Returns the contents of `pruning.json`: the numbers of `parameters` that work on a token, of
    those `stored` and of `calibration_tokens` read, `seconds` without reading and writing models,
    and `plan`. Raises a `UserError` if the method does not fit the model.
    """
    inputs.dense.require("memory")
    chosen = PRUNING[method]
    total = num_parameters(inputs.dense.model)
    started = time.monotonic()
    require_prunable(method, inputs.dense, inputs.dense.device)
    pruned = chosen.prune(inputs)
    tokens = inputs.tokens_BT.numel()
    if chosen.is_trained:
        tokens = inputs.steps * inputs.batch(0).numel() if inputs.excess > 0 else 0
    metrics = {
        "parameters": total - pruned.removed,
        "stored": total - pruned.removed,
        "calibration_tokens": tokens,
        "seconds": round(time.monotonic() - started, 3),
        "plan": pruned.plan,
    }
    if pruned.tensors:
        save_tensors(pruned.tensors, folder / TENSORS)
    else:
        write_weights(inputs.dense, folder / MODEL)
        config = folder / MODEL / "config.json"
        write_json(config, read_json(config) | (pruned.config or {}))
    write_json(folder / PRUNING_METRICS, metrics)
    return metrics
