"""ExpertLayout: the waist of the system.

Every road to a Mixture-of-Experts (DOT-MoE and each baseline) ends in an `ExpertLayout`, and it is
all that export, evaluation and report know.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dotmoe.errors import UserError, one_line
from dotmoe.granularity import Granularity

ALWAYS_ON = -1
"""In place of an expert's number: the neuron runs for every token."""


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """Which expert each FFN neuron belongs to, and which experts run for a token.

    Token x runs the `active_experts` experts with the largest `router_LED[layer] @ x`, computed in
    float32; their outputs are summed with weight exactly 1 (eq:moe_output). Neurons may also be
    always on: those of a shared expert, the same number in every layer, or all of a layer's, which
    leaves that layer dense. Only leading layers can be dense.
    """

    expert_of_neuron_LN: Int[Tensor, "L N"]
    """Expert of each neuron, 0 to E - 1, or `ALWAYS_ON`; all experts have the same size."""
    router_LED: Float[Tensor, "L E D"]
    """Router rows, float32."""
    active_experts: int
    """Experts run per token (k), 1 to E. May be changed without changing anything else."""

    def __post_init__(self) -> None:
        """Refuse a layout that is unbalanced, out of range or not finite."""
        num_layers, num_experts, _ = self.router_LED.shape
        expert_LN = self.expert_of_neuron_LN.cpu().long()
        if len(expert_LN) != num_layers:
            raise ValueError(f"{len(expert_LN)} assigned layers, {num_layers} routers")
        if expert_LN.min() < ALWAYS_ON or expert_LN.max() >= num_experts:
            raise ValueError(f"expert numbers must lie in 0 to {num_experts - 1}, or be -1")
        first = self.first_dense_layers
        if first == num_layers or bool((expert_LN[first:] == ALWAYS_ON).all(dim=1).any()):
            raise ValueError("only leading layers can be dense, and not all of them")
        rows = [torch.bincount(row - ALWAYS_ON, minlength=num_experts + 1) for row in expert_LN]
        shared, *sizes = torch.stack(rows[first:]).T.tolist()
        if len(set(shared)) > 1 or len(set(map(tuple, sizes))) > 1 or len(set(sizes[0])) > 1:
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
        """FFN width (N, d_ffn)."""
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
    def expert_size(self) -> int:
        """Neurons of one expert (S)."""
        return (self.num_neurons - self.shared_size) // self.num_experts

    @property
    def granularity(self) -> Granularity:
        """Its split, as the records on disk hold it."""
        return Granularity(
            num_experts=self.num_experts,
            expert_size=self.expert_size,
            active_experts=self.active_experts,
            shared_size=self.shared_size,
            first_dense_layers=self.first_dense_layers,
        )

    def neurons_of_expert(self, layer: int) -> Int[Tensor, "E S"]:
        """Neuron numbers of each expert of a split layer, ascending within an expert."""
        order = torch.argsort(self.expert_of_neuron_LN[layer], stable=True)
        return order[self.shared_size :].view(self.num_experts, self.expert_size)

    def shared_neurons(self, layer: int) -> Int[Tensor, " N"]:
        """Neuron numbers of the shared expert of a layer, ascending; all of a dense layer's."""
        return (self.expert_of_neuron_LN[layer] == ALWAYS_ON).nonzero().squeeze(1)

    def with_active_experts(self, active_experts: int) -> "ExpertLayout":
        """The same experts and routers with another k."""
        return replace(self, active_experts=active_experts)

    def save(self, path: Path) -> None:
        """Write as one safetensors file."""
        expert_of_neuron = self.expert_of_neuron_LN.to(torch.int32).cpu().contiguous()
        router = self.router_LED.float().cpu().contiguous()
        tensors = {"expert_of_neuron": expert_of_neuron, "router": router}
        metadata = {"format": "dotmoe-layout-1", "active_experts": str(self.active_experts)}
        save_file(tensors, path, metadata=metadata)

    @classmethod
    def load(cls, path: Path) -> "ExpertLayout":
        """Read a file written by `save`.

        Raises:
            UserError: The file is missing, truncated or not a layout.
        """
        try:
            with safe_open(path, framework="pt") as file:
                return cls(
                    expert_of_neuron_LN=file.get_tensor("expert_of_neuron").long(),
                    router_LED=file.get_tensor("router"),
                    active_experts=int((file.metadata() or {})["active_experts"]),
                )
        except (OSError, KeyError, SafetensorError) as error:
            raise UserError(f"{path} is no layout ({one_line(error)}). Extract again.") from error
