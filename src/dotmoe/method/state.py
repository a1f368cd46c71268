"""What alignment learns: the affinities and routers of a model, and their file."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor

from dotmoe.common.files import save_tensors
from dotmoe.method.layout import key_of
from dotmoe.models.targets import TARGETS

STATE = "state.safetensors"
"""File of a stage that makes states."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignState:
    """The affinities and routers that alignment learns, always float32."""

    affinity_LNE: Float[Tensor, "L N F"]
    """Score of each of N units for each of F columns in L layers (A; "assignment logits" in the
    paper). F is the number of experts, E, or E + 1 with a shared expert, whose column is last."""
    router_LED: Float[Tensor, "L E D"]
    """Router rows."""
    target: str = "ffn"
    """What is split, a name of `TARGETS`."""


States = tuple[AlignState, ...]
"""The states of a model, one for each target: of FFNs, of attention, or of both in this order."""


def save_states(states: States, folder: Path) -> None:
    """Write the file `STATE` of a stage's folder."""
    tensors = {}
    for each in states:
        tensors[key_of(each.target, "affinity")] = each.affinity_LNE
        tensors[key_of(each.target, "router")] = each.router_LED
    save_tensors(tensors, folder / STATE, format="dotmoe-state-1")


def load_states(folder: Path, device: torch.device) -> States:
    """Read what `save_states` wrote; the run folder has verified the file."""
    tensors = load_file(folder / STATE, str(device))
    return tuple(
        AlignState(
            affinity_LNE=tensors[key_of(target, "affinity")],
            router_LED=tensors[key_of(target, "router")],
            target=target,
        )
        for target in TARGETS
        if key_of(target, "router") in tensors
    )
