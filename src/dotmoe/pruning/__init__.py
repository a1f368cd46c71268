"""Other ways to a cheaper model: published methods that prune, each a row beside the conversions.

Each file says what is the rival's and what differs; `contract.py` is what a method has to do.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file

from dotmoe.files import read_json, write_json
from dotmoe.finetuning import MODEL as MODEL
from dotmoe.finetuning import write_weights
from dotmoe.models.family import DenseModel, num_parameters
from dotmoe.pruning import two_of_four
from dotmoe.pruning.by_curvature import k_obd, llm_surgeon, require_memory
from dotmoe.pruning.contract import Pruned
from dotmoe.pruning.contract import PruneInputs as PruneInputs
from dotmoe.pruning.disp_llm import disp_llm
from dotmoe.pruning.llm_pruner import llm_pruner, require_separate_heads
from dotmoe.pruning.modegpt import modegpt, require_plain_heads
from dotmoe.pruning.slicegpt import require_norms_before, sliced, slicegpt
from dotmoe.pruning.whole_layers import shortgpt, sleb

FIGURES, TENSORS = "pruning.json", "tensors.safetensors"
"""What `prune` returns, and what is kept in place of a checkpoint, in the stage's folder."""


class Method(NamedTuple):
    """A published way to prune a model."""

    prune: Callable[[PruneInputs], Pruned]
    """Changes the model that it is given."""
    require: Callable[[DenseModel, torch.device], None] = lambda dense, device: None
    """Raises a `UserError` where the method does not fit a model, be it without weights, or the
    device that is to hold it."""
    is_fixed: bool = False
    """Whether it removes the same whatever the budget."""
    is_trained: bool = False
    """Whether it takes steps on training text, with a seed."""
    applied: Callable[..., AbstractContextManager[None]] | None = None
    """Where no stock checkpoint can hold it: inside, the model computes it by `Pruned.tensors`."""


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
"""Methods by the name on the command line: a new one is one line here."""

if TYPE_CHECKING:
    PruningName = str
else:
    PruningName = Literal[(*PRUNING,)]


@torch.no_grad()
def prune(method: str, inputs: PruneInputs, folder: Path) -> dict[str, Any]:
    """Prune a model by a method of `PRUNING`, to as many parameters as are wanted if it can.

    `folder` receives `model/`, a stock checkpoint in the dtype of the dense one, or in its place
    `tensors.safetensors`, and `pruning.json`.

    Returns the contents of `pruning.json`: `parameters` that work on a token and that are `stored`,
    `calibration_tokens` read, `seconds` without reading and writing models, `plan`. Raises a
    `UserError`: the method does not fit the model.
    """
    chosen, total, started = PRUNING[method], num_parameters(inputs.dense.model), time.monotonic()
    chosen.require(inputs.dense, inputs.dense.device)
    pruned = chosen.prune(inputs)
    tokens = inputs.tokens_BT.numel()
    if chosen.is_trained:
        tokens = inputs.steps * inputs.batch(0).numel() if inputs.excess > 0 else 0
    figures = {
        "parameters": total - pruned.removed,
        "stored": total - pruned.removed,
        "calibration_tokens": tokens,
        "seconds": round(time.monotonic() - started, 3),
        "plan": pruned.plan,
    }
    if pruned.tensors:
        save_file(pruned.tensors, folder / TENSORS)
    else:
        write_weights(inputs.dense, folder / MODEL)
        config = folder / MODEL / "config.json"
        write_json(config, read_json(config) | (pruned.config or {}))
    write_json(folder / FIGURES, figures)
    return figures
