"""`ExpertLayout`, in which every method ends, and all that export, evaluation and report know."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dotmoe.errors import UserError, one_line
from dotmoe.granularity import Granularity, joined, parts_of
from dotmoe.models.family import TARGETS

ALWAYS_ON = -1
"""In place of an expert's number: the neuron runs for every token."""
DROPPED = -2
"""In place of an expert's number: the neuron is left out, and runs for no token."""


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """Which expert each unit belongs to, and which experts run for a token.

    A unit is an FFN neuron; with `target` attention it is a query head, and where both are split
    `beside` has the layout of the heads.

    Token x runs the `active_experts` experts with the largest `router_LED[layer] @ x`, computed in
    float32; their outputs are summed with weight exactly 1 (eq:moe_output). Neurons may also be
    always on: those of a shared expert, the same number in every layer, or all of a layer's, which
    leaves that layer dense. Only leading layers can be dense. Or dropped, as many in each split
    layer.
    """

    expert_of_neuron_LN: Int[Tensor, "L N"]
    """Expert of each neuron, 0 to E - 1, `ALWAYS_ON` or `DROPPED`; all experts have one size."""
    router_LED: Float[Tensor, "L E D"]
    """Router rows, float32."""
    active_experts: int
    """Experts run per token (k), 1 to E. May be changed without changing anything else."""
    target: str = "ffn"
    """What is split, a name of `TARGETS`."""
    beside: "ExpertLayout | None" = None
    """The layout of attention, where that of FFNs is not all."""

    def __post_init__(self) -> None:
        """Refuse a layout that is unbalanced, out of range or not finite."""
        num_layers, num_experts, _ = self.router_LED.shape
        expert_LN = self.expert_of_neuron_LN.cpu().long()
        if len(expert_LN) != num_layers:
            raise ValueError(f"{len(expert_LN)} assigned layers, {num_layers} routers")
        if expert_LN.min() < DROPPED or expert_LN.max() >= num_experts:
            raise ValueError(f"expert numbers must lie in 0 to {num_experts - 1}, or be -1 or -2")
        first = self.first_dense_layers
        if first == num_layers or bool((expert_LN[first:] == ALWAYS_ON).all(dim=1).any()):
            raise ValueError("only leading layers can be dense, and not all of them")
        rows = [torch.bincount(row - DROPPED, minlength=num_experts + 2) for row in expert_LN]
        dropped, shared, *sizes = torch.stack(rows[first:]).T.tolist()
        uneven = any(len(set(counts)) > 1 for counts in (dropped, shared, sizes[0]))
        if uneven or len(set(map(tuple, sizes))) > 1:
            least, most = min(map(min, sizes)), max(map(max, sizes))
            raise ValueError(f"experts are not balanced: {least} to {most} neurons")
        if not bool(torch.isfinite(self.router_LED).all()):
            raise ValueError("router weights contain NaN or infinity")
        if not 1 <= self.active_experts <= num_experts:
            raise UserError(
                f"active_experts is {self.active_experts}, but the layout has {num_experts} "
                f"experts a layer. Choose 1 to {num_experts}."
            )

    @property
    def num_layers(self) -> int:
        """Layers (L)."""
        return self.router_LED.shape[0]

    @property
    def num_experts(self) -> int:
        """Experts a layer (E)."""
        return self.router_LED.shape[1]

    @property
    def num_neurons(self) -> int:
        """Units of a layer (N): of an FFN d_ffn, of attention N_h."""
        return self.expert_of_neuron_LN.shape[1]

    @property
    def first_dense_layers(self) -> int:
        """Leading layers that stay dense, 0 to L - 1."""
        return int((self.expert_of_neuron_LN == ALWAYS_ON).all(dim=1).sum())

    @property
    def moe_layers(self) -> range:
        """Numbers of the layers that are split."""
        return range(self.first_dense_layers, self.num_layers)

    @property
    def shared_size(self) -> int:
        """Neurons of the shared expert of a split layer, 0 where there is none."""
        return int((self.expert_of_neuron_LN[-1] == ALWAYS_ON).sum())

    @property
    def dropped_size(self) -> int:
        """Neurons of a split layer that are left out."""
        return int((self.expert_of_neuron_LN[-1] == DROPPED).sum())

    @property
    def expert_size(self) -> int:
        """Neurons of one expert (S)."""
        return (self.num_neurons - self.shared_size - self.dropped_size) // self.num_experts

    @property
    def granularity(self) -> Granularity:
        """Its split, as the records on disk hold it."""
        return Granularity(
            num_experts=self.num_experts,
            expert_size=self.expert_size,
            active_experts=self.active_experts,
            shared_size=self.shared_size,
            dropped_size=self.dropped_size,
            first_dense_layers=self.first_dense_layers,
            target=self.target,
            beside=self.beside.granularity if self.beside else None,
        )

    def neurons_of_expert(self, layer: int) -> Int[Tensor, "E S"]:
        """Neuron numbers of each expert of a split layer, ascending within an expert."""
        order = torch.argsort(self.expert_of_neuron_LN[layer], stable=True)
        routed = order[self.dropped_size + self.shared_size :]
        return routed.view(self.num_experts, self.expert_size)

    def shared_neurons(self, layer: int) -> Int[Tensor, " N"]:
        """Neuron numbers of the shared expert of a layer, ascending; all of a dense layer's."""
        return (self.expert_of_neuron_LN[layer] == ALWAYS_ON).nonzero().squeeze(1)

    def of_target(self, target: str) -> "ExpertLayout | None":
        """The layout of one target, if it is split."""
        return next((part for part in parts_of(self) if part.target == target), None)

    def with_active_experts(self, active_experts: int) -> "ExpertLayout":
        """The same experts and routers with another k."""
        return replace(self, active_experts=active_experts)

    def without_idlest(self, work_LE: Float[Tensor, "L E"], num_dropped: int) -> "ExpertLayout":
        """The same without so many experts of each split layer, those of least `work_LE`."""
        experts, own_LN = self.num_experts, self.expert_of_neuron_LN.clone()
        router_LED = self.router_LED[:, : experts - num_dropped].clone()
        for layer, work_E in zip(self.moe_layers, work_LE, strict=True):
            kept_E = work_E.argsort(stable=True)[num_dropped:].sort().values
            number_E = torch.full((experts + 2,), DROPPED)
            number_E[kept_E], number_E[ALWAYS_ON] = torch.arange(len(kept_E)), ALWAYS_ON
            own_LN[layer] = number_E[own_LN[layer]]
            router_LED[layer] = self.router_LED[layer, kept_E]
        return replace(self, expert_of_neuron_LN=own_LN, router_LED=router_LED)

    def save(self, path: Path) -> None:
        """Write as one safetensors file."""
        tensors, metadata = {}, {"format": "dotmoe-layout-1"}
        for part in parts_of(self):
            expert_of_neuron = part.expert_of_neuron_LN.to(torch.int32).cpu().contiguous()
            tensors[in_file(part.target, "expert_of_neuron")] = expert_of_neuron
            tensors[in_file(part.target, "router")] = part.router_LED.float().cpu().contiguous()
            metadata[in_file(part.target, "active_experts")] = str(part.active_experts)
        save_file(tensors, path, metadata=metadata)

    @classmethod
    def load(cls, path: Path) -> "ExpertLayout":
        """Read a file written by `save`. A `UserError`: it is missing, truncated or no layout."""
        try:
            with safe_open(path, framework="pt") as file:
                said = file.metadata() or {}
                names = {target: partial(in_file, target) for target in TARGETS}
                return joined(
                    cls(
                        expert_of_neuron_LN=file.get_tensor(named("expert_of_neuron")).long(),
                        router_LED=file.get_tensor(named("router")),
                        active_experts=int(said[named("active_experts")]),
                        target=target,
                    )
                    for target, named in names.items()
                    if named("active_experts") in said
                )
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise UserError(f"{path} is no layout ({one_line(error)}). Extract again.") from error


def in_file(target: str, name: str) -> str:
    """Name of a tensor or value of a target in the files of a run: that of FFNs is plain."""
    return name if target == "ffn" else f"{target}.{name}"
