"""The layout: which expert each unit belongs to, and the routers.

Every method ends in an `ExpertLayout`, which is all that export, evaluation and report know of it.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dotmoe.common.errors import UserError, one_line
from dotmoe.common.files import is_finite, save_tensors
from dotmoe.method.granularity import Granularity, Splits
from dotmoe.models.targets import TARGETS

LAYOUT = "layout.safetensors"
"""File of a stage that makes layouts."""
ALWAYS_ON = -1
"""Stands in place of an expert number: the neuron runs for every token."""
DROPPED = -2
"""Stands in place of an expert number: the neuron is left out, and runs for no token."""


def columns_of(expert_N: Int[Tensor, "*L N"], num_experts: int) -> Int[Tensor, "*L N"]:
    """Column of each unit, 0 to E + 1: its expert, E if always on, E + 1 if dropped."""
    expert_N = torch.where(expert_N == ALWAYS_ON, num_experts, expert_N)
    return torch.where(expert_N == DROPPED, num_experts + 1, expert_N)


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """Which expert each unit belongs to, and which experts run for a token.

    Token x runs the `active_experts` experts with the largest `router_LED[layer] @ x`, computed in
    float32; their outputs are summed with weight exactly 1 (eq:moe_output). Units may also be
    dropped, or always on: those of a shared expert, or all units of a leading layer, which is then
    dense. All split layers have the same number of each kind.
    """

    expert_of_neuron_LN: Int[Tensor, "L N"]
    """Expert of each neuron, 0 to E - 1, `ALWAYS_ON` or `DROPPED`; experts have the same size."""
    router_LED: Float[Tensor, "L E D"]
    """Router rows, float32."""
    active_experts: int
    """Experts run per token (k), 1 to E. May be changed without changing anything else."""
    target: str = "ffn"
    """What is split, a name of `TARGETS`."""

    def __post_init__(self) -> None:
        """Raise a `ValueError` for a layout that is unbalanced, out of range or not finite."""
        num_layers, num_experts, _ = self.router_LED.shape
        expert_LN = self.expert_of_neuron_LN.cpu().long()
        if len(expert_LN) != num_layers:
            raise ValueError(f"{len(expert_LN)} layers are assigned, but {num_layers} have routers")
        if expert_LN.min() < DROPPED or expert_LN.max() >= num_experts:
            raise ValueError(f"expert numbers must lie in 0 to {num_experts - 1}, or be -1 or -2")
        split_LN = expert_LN[self.moe_layers.start :]
        if not len(split_LN) or bool((split_LN == ALWAYS_ON).all(dim=1).any()):
            raise ValueError("only leading layers can be dense, and not all of them")
        column_LN = columns_of(split_LN, num_experts)
        counts = torch.stack([row.bincount(minlength=num_experts + 2) for row in column_LN])
        sizes_LE = counts[:, :num_experts]
        if bool((counts != counts[0]).any() or (sizes_LE != sizes_LE[0, 0]).any()):
            least, most = sizes_LE.aminmax()
            raise ValueError(f"experts are not balanced: {least} to {most} neurons")
        if not is_finite(self.router_LED):
            raise ValueError("router weights contain NaN or infinity")
        if not 1 <= self.active_experts <= num_experts:
            raise UserError(
                f"active_experts is {self.active_experts}, but the layout has {num_experts} "
                f"experts per layer. Choose 1 to {num_experts}."
            )

    @property
    def num_layers(self) -> int:
        """Number of layers (L)."""
        return self.router_LED.shape[0]

    @property
    def num_experts(self) -> int:
        """Number of experts per layer (E)."""
        return self.router_LED.shape[1]

    @property
    def expert_size(self) -> int:
        """Number of units per expert (S)."""
        return int((self.expert_of_neuron_LN[-1] >= 0).sum()) // self.num_experts

    @property
    def moe_layers(self) -> range:
        """Numbers of the layers that are split; those before them are dense."""
        return range(int((self.expert_of_neuron_LN == ALWAYS_ON).all(1).sum()), self.num_layers)

    @property
    def granularity(self) -> Granularity:
        """The split of this layout."""
        return Granularity(
            num_experts=self.num_experts,
            expert_size=self.expert_size,
            active_experts=self.active_experts,
            shared_size=int((self.expert_of_neuron_LN[-1] == ALWAYS_ON).sum()),
            dropped_size=int((self.expert_of_neuron_LN[-1] == DROPPED).sum()),
            first_dense_layers=self.moe_layers.start,
            target=self.target,
        )

    def neurons_of_expert(self, layer: int) -> Int[Tensor, "E S"]:
        """Neuron numbers of each expert of a split layer, ascending within an expert."""
        expert_N = self.expert_of_neuron_LN[layer]
        order = torch.argsort(expert_N, stable=True)
        return order[int((expert_N < 0).sum()) :].view(self.num_experts, -1)

    def shared_neurons(self, layer: int) -> Int[Tensor, " M"]:
        """Neuron numbers of a layer's shared expert, ascending; all neurons in a dense layer."""
        return (self.expert_of_neuron_LN[layer] == ALWAYS_ON).nonzero().squeeze(1)

    @classmethod
    def load(cls, path: Path) -> "ExpertLayout":
        """Read the first layout of a file, that of FFNs if they are split; see `load_layouts`."""
        return load_layouts(path.parent, path.name)[0]


Layouts = tuple[ExpertLayout, ...]
"""The layouts of a model, one for each target: of FFNs, of attention, or of both in this order."""


def splits_in(layouts: Layouts) -> Splits:
    """The split of each layout."""
    return tuple(layout.granularity for layout in layouts)


def save_layouts(layouts: Layouts, folder: Path) -> None:
    """Write the file `LAYOUT` of a stage's folder."""
    tensors = {}
    metadata = {"format": "dotmoe-layout-1"}
    for each in layouts:
        expert_of_neuron = each.expert_of_neuron_LN.to(torch.int32)
        tensors[key_of(each.target, "expert_of_neuron")] = expert_of_neuron
        tensors[key_of(each.target, "router")] = each.router_LED.float()
        metadata[key_of(each.target, "active_experts")] = str(each.active_experts)
    save_tensors(tensors, folder / LAYOUT, **metadata)


def load_layouts(folder: Path, name: str = LAYOUT) -> Layouts:
    """Read what `save_layouts` wrote; a `UserError` if it is missing, truncated or no layout."""
    try:
        with safe_open(folder / name, framework="pt") as file:
            metadata = file.metadata() or {}
            layouts = tuple(
                ExpertLayout(
                    expert_of_neuron_LN=file.get_tensor(key_of(each, "expert_of_neuron")).long(),
                    router_LED=file.get_tensor(key_of(each, "router")),
                    active_experts=int(metadata[key_of(each, "active_experts")]),
                    target=each,
                )
                for each in TARGETS
                if key_of(each, "active_experts") in metadata
            )
        if not layouts:
            raise ValueError("it names no experts")
    except (OSError, ValueError, SafetensorError) as error:
        what = f"{folder / name} is not a valid layout ({one_line(error)})"
        raise UserError(f"{what}. Extract again.") from error
    return layouts


def key_of(target: str, name: str) -> str:
    """Name of a target's tensor or value in the files of a run; for FFNs it has no prefix."""
    return name if target == "ffn" else f"{target}.{name}"
