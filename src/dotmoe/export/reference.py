"""What an export is compared with: the masked dense model, with weights fresh from the files."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dotmoe.artifacts import DenseModel
from dotmoe.errors import UserError
from dotmoe.export.dense_tensors import DenseTensors
from dotmoe.export.weights_on_disk import empty_model, is_on_disk, on_disk
from dotmoe.layout import ALWAYS_ON, ExpertLayout
from dotmoe.moe.surgery import masked_by


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceLogits:
    """Logits on the verification text, computed in float32 from the weights as exported."""

    same_routes_TV: Float[Tensor, "T V"]
    """Of the layout's MoE when every token is sent where the exported model sent it."""
    own_routes_TV: Float[Tensor, "T V"]
    """Of the layout's MoE as it routes itself."""
    dense_TV: Float[Tensor, "T V"]
    """Of the dense model, which k = E must give."""
    masked_floor: float
    """`logits_error` of `same_routes_TV` computed in the exported dtype; 0 for float32."""
    dense_floor: float
    """The same of the dense model."""


def logits_error(logits_TV: Float[Tensor, "T V"], reference_TV: Float[Tensor, "T V"]) -> float:
    """Mean |difference| in standard deviations of the reference logits."""
    return float((logits_TV - reference_TV).abs().mean() / reference_TV.std())


def top1_agreement(logits_TV: Float[Tensor, "T V"], reference_TV: Float[Tensor, "T V"]) -> float:
    """Share of tokens with the same most likely next token."""
    return float((logits_TV.argmax(dim=1) == reference_TV.argmax(dim=1)).double().mean())


def logits_of(model: Any, tokens_BT: Int[Tensor, "B T"]) -> Float[Tensor, "T V"]:
    """Logits of all tokens, row after row, float32 on the CPU."""
    logits: Tensor = model(input_ids=tokens_BT, use_cache=False).logits
    return logits.flatten(0, 1).float().cpu()


@torch.no_grad()
def reference_logits(
    dense: DenseModel,
    tensors: DenseTensors,
    layout: ExpertLayout,
    tokens_BT: Int[Tensor, "B T"],
    routes: Mapping[int, Int[Tensor, "T K"]],
    dtype: torch.dtype,
) -> ReferenceLogits:
    """Run the dense model from its files, masked and unmasked; `dense` itself is left as it is.

    No more than one layer, or the embedding or head, is in memory at a time.

    Args:
        dense: The dense model.
        tensors: Its files.
        layout: What was exported.
        tokens_BT: Text.
        routes: Experts that the exported model chose, by split layer.
        dtype: Dtype of the exported weights.

    Raises:
        UserError: The model in memory has other weights than its folder.
    """
    require_same_weights(dense, tensors)
    exact = on_disk(dense, dense.device, torch.float32, rounded_to=dtype)

    def same_routes_and_dense(twin: DenseModel) -> tuple[Tensor, Tensor]:
        with routed(twin, layout, routes):
            same_routes_TV = logits_of(twin.model, tokens_BT)
        return same_routes_TV, logits_of(twin.model, tokens_BT)

    same_routes_TV, dense_TV = same_routes_and_dense(exact)
    with masked_by(exact, layout):
        own_routes_TV = logits_of(exact.model, tokens_BT)
    masked_floor = dense_floor = 0.0
    if dtype != torch.float32:
        rounded_masked_TV, rounded_dense_TV = same_routes_and_dense(
            on_disk(dense, dense.device, dtype)
        )
        masked_floor = logits_error(rounded_masked_TV, same_routes_TV)
        dense_floor = logits_error(rounded_dense_TV, dense_TV)
    return ReferenceLogits(
        same_routes_TV=same_routes_TV,
        own_routes_TV=own_routes_TV,
        dense_TV=dense_TV,
        masked_floor=masked_floor,
        dense_floor=dense_floor,
    )


def neuron_mask(
    chosen_TK: Int[Tensor, "T K"], layout: ExpertLayout, layer: int
) -> Bool[Tensor, "T N"]:
    """Which neurons of a layer run for each token: R M^T as true and false (eq:moe_output).

    A last column of R stands for the neurons that are always on.
    """
    shape = (len(chosen_TK), layout.num_experts + 1)
    runs_TE = torch.zeros(shape, dtype=torch.bool, device=chosen_TK.device)
    runs_TE.scatter_(1, chosen_TK, True)
    runs_TE[:, ALWAYS_ON] = True
    return runs_TE[:, layout.expert_of_neuron_LN[layer].to(chosen_TK.device)]


@contextmanager
def routed(
    dense: DenseModel, layout: ExpertLayout, routes: Mapping[int, Int[Tensor, "T K"]]
) -> Iterator[None]:
    """Inside, `dense.model` runs the experts that `routes` names for each token; nothing is routed.

    Where two logits are as good as equal, two exact implementations may choose differently, and a
    single other choice changes every later token. With the routes given, all the rest of two models
    can be compared closely.
    """

    def masks_hidden(layer: int) -> Any:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> Tensor:
            mask_TN = neuron_mask(routes[layer].to(arguments[0].device), layout, layer)
            return arguments[0] * mask_TN.view_as(arguments[0])

        return hook

    hooks = [
        dense.family.ffn(layer).down.register_forward_pre_hook(masks_hidden(index))
        for index, layer in enumerate(dense.family.layers(dense.model))
        if index in routes
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def require_same_weights(dense: DenseModel, tensors: DenseTensors) -> None:
    """Refuse a model in memory that is not the one in its folder, as after fine-tuning.

    Raises:
        UserError: Names the first weight that differs.
    """
    if is_on_disk(dense.model):
        return
    for name, parameter in dense.model.named_parameters():
        if not torch.equal(tensors.read(name).to(parameter.dtype), parameter.data.cpu()):
            raise UserError(
                f"{name} differs between the model in memory and {tensors.folder}, and export "
                "takes the weights from the folder. Save the model there first."
            )
    tensors.forget()


def copy_from_files(dense: DenseModel, tensors: DenseTensors, dtype: torch.dtype) -> DenseModel:
    """The dense model in memory in float32, with the weights of its files rounded to `dtype`.

    Raises:
        UserError: The model in memory has other weights than its folder.
    """
    require_same_weights(dense, tensors)
    model = empty_model(dense.config, dense.device, torch.float32)
    for name, parameter in model.named_parameters():
        parameter.data = tensors.read(name).to(dtype).to(parameter.device, torch.float32)
    return replace(dense, model=model)


def sample_tokens(tokens_BT: Int[Tensor, "B T"], limit: int, context: int) -> Tensor:
    """At most `limit` tokens, in rows no longer than the context.

    Raises:
        UserError: There are no tokens, or `limit` is below 1.
    """
    if limit < 1 or tokens_BT.numel() == 0:
        raise UserError(
            f"{min(limit, tokens_BT.numel())} tokens are left for verification, but an export is "
            "never written unverified. Give text, and at least 1 token."
        )
    length = min(tokens_BT.shape[1], context, limit)
    return tokens_BT[: max(1, limit // length), :length]
