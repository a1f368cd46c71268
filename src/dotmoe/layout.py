"""ExpertLayout: the waist of the system.

Every road to a Mixture-of-Experts (DOT-MoE and each baseline) ends in an `ExpertLayout`, and it is
all that export, evaluation and report know. Shape letters of the whole repository: T tokens,
D model width, N FFN neurons, E experts, S neurons of one expert (capacity), K active experts,
L layers, V vocabulary.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dotmoe.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """Which expert each FFN neuron belongs to, and which experts run for a token.

    Token x runs the `active_experts` experts with the largest `router_LED[layer] @ x`, computed in
    float32; their outputs are summed with weight exactly 1 (eq:moe_output).
    """

    expert_of_neuron_LN: Int[Tensor, "L N"]
    """Expert of each neuron, 0 to E - 1; every expert holds the same number of neurons."""
    router_LED: Float[Tensor, "L E D"]
    """Router rows, float32."""
    active_experts: int
    """Experts run per token (k), 1 to E. May be changed without changing anything else."""

    def __post_init__(self) -> None:
        """Refuse a layout that is unbalanced, out of range or not finite."""
        num_layers, num_experts, _ = self.router_LED.shape
        counts = torch.zeros(num_layers, num_experts, dtype=torch.long)
        assignment = self.expert_of_neuron_LN
        if assignment.shape[0] != num_layers:
            raise ValueError(f"{assignment.shape[0]} assigned layers, {num_layers} routers")
        if int(assignment.min()) < 0 or int(assignment.max()) >= num_experts:
            raise ValueError(f"expert numbers must lie in 0 to {num_experts - 1}")
        counts.scatter_add_(1, assignment.cpu().long(), torch.ones_like(assignment.cpu()).long())
        if bool((counts != counts[0, 0]).any()):
            raise ValueError(
                f"experts are not balanced: {int(counts.min())} to {int(counts.max())} neurons"
            )
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
    def expert_size(self) -> int:
        """Neurons of one expert (S)."""
        return self.num_neurons // self.num_experts

    @property
    def active_fraction(self) -> float:
        """Share of the FFN neurons that run per token, K / E."""
        return self.active_experts / self.num_experts

    def neurons_of_expert(self, layer: int) -> Int[Tensor, "E S"]:
        """Neuron numbers of each expert of one layer, ascending within an expert."""
        order = torch.argsort(self.expert_of_neuron_LN[layer], stable=True)
        return order.view(self.num_experts, self.expert_size)

    def with_active_experts(self, active_experts: int) -> "ExpertLayout":
        """The same experts and routers with another k."""
        return replace(self, active_experts=active_experts)

    def save(self, path: Path) -> None:
        """Write as one safetensors file."""
        tensors = {
            "expert_of_neuron": self.expert_of_neuron_LN.to(torch.int32).cpu().contiguous(),
            "router": self.router_LED.float().cpu().contiguous(),
        }
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
                metadata = file.metadata() or {}
                if metadata.get("format") != "dotmoe-layout-1":
                    raise UserError(f"{path} is not a dotmoe layout. Run the extract stage again.")
                return cls(
                    expert_of_neuron_LN=file.get_tensor("expert_of_neuron").long(),
                    router_LED=file.get_tensor("router"),
                    active_experts=int(metadata["active_experts"]),
                )
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{path} cannot be read as a layout ({error}). Extract again."
            ) from error
