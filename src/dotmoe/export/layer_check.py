"""Each exported MoE block beside the exact one, on identical inputs."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dotmoe.artifacts import DenseModel
from dotmoe.export.architecture import OutputArchitecture, granularity_of
from dotmoe.export.dense_tensors import DenseTensors
from dotmoe.export.reference import logits_of, neuron_mask
from dotmoe.export.router_scale import shortfall
from dotmoe.layout import ExpertLayout

CLOSE = 2.0**-8
"""Logits closer than this share of their standard deviation may fall into one float32 score: at the
recommended scale a sigmoid resolves 2^-11.3 of it, and its own error is a few times that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCheck:
    """One exported block against the binary-gate FFN (eq:moe_output) in float32.

    Outputs are compared for the experts that the block chose; its choice is judged apart.
    """

    block_error: float
    """Median over tokens of the relative L2 error of the block's output."""
    block_error_tail: float
    """99th percentile of the same: a single wrong expert shows here, not in the median."""
    block_floor: float
    """The same error of the masked FFN computed in the exported dtype; 0 for float32."""
    misrouted: float
    """Share of tokens for which an expert left out has a larger exact logit than one chosen."""
    misrouted_floor: float
    """The same share for the unscaled router in the dtype in which the architecture's runtimes
    compute logits: in bfloat16 many tie. 0 where that is float32."""
    misrouted_far: float
    """Share for which it is larger by more than 2^-8 of the logits' standard deviation and the
    rounding of logits in that dtype."""


@dataclass(frozen=True, kw_only=True)
class LayerReference:
    """Where the exact blocks come from."""

    dense: DenseModel
    tensors: DenseTensors
    layout: ExpertLayout
    output: OutputArchitecture
    dtype: torch.dtype

    def check(self, layer: int, chosen_TK: Tensor, x_TD: Tensor, actual_TD: Tensor) -> LayerCheck:
        """Compare one block's choice of experts and its output with the exact ones."""
        router_ED = self.layout.router_LED[layer].to(x_TD.device)
        logits_TE = x_TD.double() @ router_ED.double().T
        short_T = shortfall(logits_TE, chosen_TK)
        rounded_TE = self._rounded_logits(x_TD, router_ED)
        floor_T = shortfall(logits_TE, rounded_TE.topk(chosen_TK.shape[1], dim=1).indices)
        close_T = CLOSE * logits_TE.std() + 2 * (rounded_TE - logits_TE).abs().amax(dim=1)
        mask_TN = neuron_mask(chosen_TK, self.layout, layer)
        if not self.output.block_has_shared:
            mask_TN[:, self.layout.shared_neurons(layer).to(mask_TN.device)] = False
        exact_TD = self._ffn(layer, x_TD.float(), mask_TN)
        error_T = relative_error(actual_TD, exact_TD)
        floor = 0.0
        if self.dtype != torch.float32:
            rounded_TD = self._ffn(layer, x_TD, mask_TN)
            floor = float(relative_error(rounded_TD, exact_TD).median())
        return LayerCheck(
            block_error=float(error_T.median()),
            block_error_tail=float(error_T.quantile(0.99)),
            block_floor=floor,
            misrouted=float((short_T > 0).double().mean()),
            misrouted_floor=float((floor_T > 0).double().mean()),
            misrouted_far=float((short_T > close_T).double().mean()),
        )

    def _rounded_logits(self, x_TD: Tensor, router_ED: Tensor) -> Tensor:
        """Logits as the runtimes compute them, but for the scale of the router."""
        if not self.output.gating(granularity_of(self.layout)).logits_in_model_dtype:
            return x_TD.double() @ router_ED.double().T
        return F.linear(x_TD, router_ED.to(x_TD.dtype)).double()

    def _ffn(self, layer: int, x_TD: Tensor, mask_TN: Tensor) -> Tensor:
        """The masked FFN in the dtype of its input; one projection is in memory at a time."""
        names = [self.dense.family.ffn_tensor(layer, name) for name in ("gate", "up", "down")]
        weights = (
            self.tensors.read(name).to(self.dtype).to(x_TD.device, x_TD.dtype) for name in names
        )
        output_TD = binary_gate_ffn(x_TD, mask_TN, weights)
        self.tensors.forget()
        return output_TD


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRun:
    """One run of an exported model over the text, with every block checked on the way."""

    layers: list[LayerCheck]
    routes: dict[int, Int[Tensor, "T K"]]
    """Experts that each split layer chose, on the CPU."""
    logits_TV: Float[Tensor, "T V"]


@torch.no_grad()
def checked_run(
    model: nn.Module, reference: LayerReference, tokens_BT: Int[Tensor, "B T"]
) -> CheckedRun:
    """Run an exported model once; a layer's dense weights are read only while it runs."""
    checks: dict[int, LayerCheck] = {}
    routes: dict[int, Tensor] = {}

    def watch(index: int, block: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def compare(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            x_TD = arguments[0].reshape(-1, arguments[0].shape[-1])
            chosen_TK = reference.output.chosen_experts(module, x_TD)
            checks[index] = reference.check(index, chosen_TK, x_TD, output.reshape(x_TD.shape))
            routes[index] = chosen_TK.cpu()

        return block.register_forward_hook(compare)

    blocks = reference.output.blocks(model)
    layers = reference.layout.moe_layers
    hooks = [watch(layer, blocks[layer]) for layer in layers]
    try:
        logits_TV = logits_of(model, tokens_BT)
    finally:
        for hook in hooks:
            hook.remove()
    return CheckedRun(
        layers=[checks[layer] for layer in layers], routes=routes, logits_TV=logits_TV
    )


def binary_gate_ffn(
    x_TD: Float[Tensor, "T D"],
    mask_TN: Bool[Tensor, "T N"],
    weights: Iterable[Tensor],
) -> Float[Tensor, "T D"]:
    """(SiLU(x W_gate) * (x W_up) * mask) W_down, every operation in the dtype of its operands.

    Args:
        x_TD: Inputs.
        mask_TN: Which neurons run.
        weights: Gate [N, D], up [N, D] and down [D, N]; each is taken when it is needed.
    """
    taken = iter(weights)
    hidden_TN = F.silu(F.linear(x_TD, next(taken)))
    hidden_TN = hidden_TN * F.linear(x_TD, next(taken))
    return F.linear(hidden_TN * mask_TN, next(taken))


def relative_error(
    actual_TD: Float[Tensor, "T D"], exact_TD: Float[Tensor, "T D"]
) -> Float[Tensor, " T"]:
    """|actual - exact| / |exact| of each token."""
    difference_T = (actual_TD.float() - exact_TD).norm(dim=1)
    size_T = exact_TD.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    error_T: Tensor = difference_T / size_T
    return error_T
