"""Verification: an export, reloaded by stock Transformers, compared with the masked dense model.

Both compute in float32 from the written weights. Metrics are quantiles over tokens; outlier tokens,
which every language model has, are counted and left out of the metrics of a block.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dotmoe.common.errors import UserError, VerificationError
from dotmoe.common.files import read_json
from dotmoe.export.format import ConvertedModel, Format
from dotmoe.export.routers import (
    MISROUTED,
    exceeded_limits,
    largest_share,
    misrouted_share,
    outliers_in,
)
from dotmoe.method.layout import ExpertLayout, Layouts, columns_of
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hooks import input_hooks
from dotmoe.models.on_disk import exported_on_disk, on_disk
from dotmoe.models.targets import TARGETS, Target
from dotmoe.models.traits import SILU, Activation

FOLDED = 2.0**-8
"""Relative error of a block whose down projections were rounded to bfloat16 after scaling."""
LOGITS, DENSE_LOGITS = 5e-3, 2e-3
"""Largest median error of a token's logits for up to 4 layers, at k and at k = E. Limits grow with
the square root of the number of layers, because every layer adds its own gate deviation."""
DISAGREEMENT = 1e-2
"""Largest share of tokens whose most likely next token differs, for up to 4 layers, plus four
standard errors; it grows in the same way."""


class Reloadable(Format):
    """A format that Transformers runs; the hooks into a reloaded model that `verify` needs."""

    block_has_shared: bool = True
    """Whether the output of a block includes that of the shared expert."""
    block_error: float = 4e-3
    """Largest accepted median relative error of a block in float32. Random routers cause 3e-4, a
    real model's routers at k = E / 2 cause 1.5e-3."""

    block_name: str = "mlp"
    router_name: str = "gate"
    """Name of the router in the block; called with [T, D], it returns the chosen experts last."""

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The FFN blocks of a reloaded model, by layer; each maps [B, T, D] to [B, T, D]."""
        layers = cast(nn.ModuleList, model.get_submodule("model.layers"))
        return [layer.get_submodule(self.block_name) for layer in layers]

    def router_and_output(self, model: nn.Module, target: str) -> list[tuple[nn.Module, nn.Module]]:
        """For each layer, the module called with the router's input, and that with the output."""
        return [(block, block) for block in self.blocks(model)]

    def chosen_experts(self, block: nn.Module, x_TD: Tensor) -> Tensor:
        """Indices of the k experts that a reloaded block runs for each token, [T, K]."""
        return cast(Tensor, block.get_submodule(self.router_name)(x_TD)[2])

    def run_active_experts(self, model: nn.Module, layers: range, active_experts: int) -> None:
        """Set k in the split layers of a reloaded model."""
        setattr(cast(Any, model).config, self.active_experts_key, active_experts)
        blocks = self.blocks(model)
        for layer in layers:
            cast(Any, blocks[layer].get_submodule(self.router_name)).top_k = active_experts


@torch.no_grad()
def verify(
    form: Reloadable, converted: ConvertedModel, folder: Path, tokens_BT: Int[Tensor, "B T"]
) -> tuple[dict[str, Any], list[str]]:
    """Check an exported folder block by block, then its logits at its own k and at k = E.

    Weights of both models stay on disk. Memory holds one part at a time in float32: an exported
    layer and one projection of the dense FFN; or a dense layer; or the embedding or head. For the
    text it holds activations and up to five copies of the logits. Models of up to
    `on_disk.KEPT_BYTES` are loaded whole.

    Returns:
        The metrics, and a sentence for each one above its limit. `layers`: for each block (for
        attention, its output projection), with the exported model's own inputs and routing, the
        relative L2 error of its output over typical tokens (median `block_error`, 95th percentile
        `block_error_tail`), and the shares of tokens `misrouted` and of `outliers`. `logits_error`,
        `logits_error_tail` and `top1_agreement`: against the masked dense model with the same
        routing, in standard deviations of the logits. `dense_error`: against the dense model at
        k = E; None if k cannot be edited or neurons are dropped.
    """
    if read_json(folder / "config.json") != form.header(converted):
        raise VerificationError(f"config.json in {folder} is not what was written. Export again.")
    found = _run_exported(form, converted, folder, tokens_BT)
    dense = converted.dense
    rounded_to = None if converted.keeps_dtypes else converted.dtype
    exact = on_disk(dense, dense.device, torch.float32, rounded_to=rounded_to)
    same_routes_TV = _logits_with_routes(exact, converted.layouts, found.routes, tokens_BT)
    error_T = logits_error(found.logits_TV, same_routes_TV)
    dense_error = None
    if found.at_full_TV is not None:
        dense_logits_TV = logits_of(exact.model, tokens_BT)
        dense_error = float(logits_error(found.at_full_TV, dense_logits_TV).median())
    metrics = {
        "loaded_class": found.loaded_class,
        "dtype": converted.dtype_name,
        "tokens": tokens_BT.numel(),
        "layers": found.layers,
        "logits_error": float(error_T.median()),
        "logits_error_tail": float(error_T.quantile(0.95)),
        "top1_agreement": top1_agreement(found.logits_TV, same_routes_TV),
        "dense_error": dense_error,
    }
    is_rounded = converted.dtype != torch.float32 and form.gating.score.startswith("softmax")
    return metrics, problems(metrics, form.block_error, FOLDED if is_rounded else 0.0)


class _Exported(NamedTuple):
    """What an exported model, reloaded, computed on the text."""

    loaded_class: str
    layers: list[dict[str, Any]]
    """The comparison of each block."""
    routes: dict[str, dict[int, Tensor]]
    """Experts of each token, [T, K], by target and layer."""
    logits_TV: Tensor
    at_full_TV: Tensor | None
    """Logits at k = E; None if k cannot be edited or neurons are dropped."""


def _run_exported(
    form: Reloadable, converted: ConvertedModel, folder: Path, tokens_BT: Int[Tensor, "B T"]
) -> _Exported:
    """Run an exported folder, and compare each block with the dense model's under its mask."""
    layouts = converted.layouts
    exported = exported_on_disk(folder, converted.dense.device, torch.float32)
    layers: list[dict[str, Any]] = []
    routes: dict[str, dict[int, Tensor]] = {part.target: {} for part in layouts}
    inputs: dict[int, Tensor] = {}

    def compare(
        part: ExpertLayout, layer: int, router: nn.Module, _: nn.Module, args: Any, output: Tensor
    ) -> None:
        x_TD, seen_TN, actual_TD = (x.flatten(0, -2) for x in (inputs[layer], args[0], output))
        chosen_TK = form.chosen_experts(router, x_TD)
        routes[part.target][layer] = chosen_TK
        layers.append(_compare(form, converted, part, layer, x_TD, chosen_TK, seen_TN, actual_TD))
        converted.on_progress(len(layers), len(layouts) * len(part.moe_layers), "layers verified")

    with ExitStack() as hooks:
        for part in layouts:
            for layer in part.moe_layers:
                router, block = form.router_and_output(exported, part.target)[layer]
                hooks.enter_context(input_hooks({layer: router}, inputs.__setitem__))
                seeing = partial(compare, part, layer, router)
                hooks.enter_context(block.register_forward_hook(seeing))
        logits_TV = logits_of(exported, tokens_BT)
    at_full_TV = None
    first, *others = layouts
    if form.active_experts_editable and not (others or first.granularity.dropped_size):
        form.run_active_experts(exported, first.moe_layers, first.num_experts)
        at_full_TV = logits_of(exported, tokens_BT)
    return _Exported(
        loaded_class=f"{type(exported).__module__}.{type(exported).__qualname__}",
        layers=layers,
        routes=routes,
        logits_TV=logits_TV,
        at_full_TV=at_full_TV,
    )


def _logits_with_routes(
    exact: DenseModel,
    layouts: Layouts,
    routes: Mapping[str, Mapping[int, Tensor]],
    tokens_BT: Int[Tensor, "B T"],
) -> Tensor:
    """Logits of the masked dense model with the experts that another model chose, [T, V].

    At a near-tie two exact implementations may choose differently, which changes every later token.
    With the same routing, everything else can be compared closely.
    """
    with ExitStack() as hooks:
        for part in layouts:
            hooks.enter_context(routed(exact, part, routes[part.target]))
        return logits_of(exact.model, tokens_BT)


def problems(measured: Mapping[str, Any], block_error: float, rounding: float) -> list[str]:
    """A sentence for each metric above its limit.

    `block_error` is the format's limit in float32; rounding of scaled weights adds `rounding`.
    """
    grows = max(1.0, len(measured["layers"]) / 4) ** 0.5
    block, logits = block_error + rounding, (LOGITS + rounding) * grows
    misrouted = largest_share(MISROUTED, measured["tokens"])
    at_full = (DENSE_LOGITS + rounding) * grows
    disagreement = largest_share((DISAGREEMENT + rounding) * grows, measured["tokens"])
    metrics: list[tuple[str, float, float]] = []
    for each in measured["layers"]:
        place = f"layer {each['layer']}"
        metrics += [
            (f"{place}: share of misrouted tokens", each["misrouted"], misrouted),
            (f"{place}: median relative block error", each["block_error"], block),
            (f"{place}: 95th percentile of the block error", each["block_error_tail"], 5 * block),
        ]
    metrics += [
        ("top-1 disagreement", 1 - measured["top1_agreement"], disagreement),
        ("median logit error", measured["logits_error"], logits),
        ("95th percentile of the logit error", measured["logits_error_tail"], 5 * logits),
        ("median logit error at k = E", measured["dense_error"] or 0.0, at_full),
    ]
    what = "The exported model differs from the masked dense model"
    return [f"{what}: {problem}" for problem in exceeded_limits(metrics)]


def _compare(
    form: Reloadable,
    converted: ConvertedModel,
    layout: ExpertLayout,
    layer: int,
    x_TD: Tensor,
    chosen_TK: Tensor,
    seen_TN: Tensor,
    actual_TD: Tensor,
) -> dict[str, Any]:
    """Compare a block's output with the binary-gate one (eq:moe_output) for the same experts."""
    target = TARGETS[layout.target]
    logits_TE = x_TD.double() @ layout.router_LED[layer].to(x_TD.device).double().T
    typical_T = ~outliers_in(logits_TE)
    mask_TN = neuron_mask(chosen_TK, layout, layer)
    if not form.block_has_shared:
        mask_TN[:, layout.shared_neurons(layer).to(mask_TN.device)] = False
    if target.name == "ffn":
        exact_TD = _exact_ffn(converted, layer, x_TD, mask_TN)
    else:
        exact_TD = _exact_output(converted, target, layer, seen_TN, mask_TN)
    smallest = torch.finfo(torch.float32).tiny
    error_T = (actual_TD.float() - exact_TD).norm(dim=1) / exact_TD.norm(dim=1).clamp_min(smallest)
    error_T = error_T[typical_T]
    block: dict[str, Any] = {"layer": layer}
    if target.name != "ffn":
        block["target"] = target.name
    return block | {
        "block_error": float(error_T.median()),
        "block_error_tail": float(error_T.quantile(0.95)),
        "misrouted": misrouted_share(logits_TE[typical_T], chosen_TK[typical_T]),
        "outliers": float((~typical_T).double().mean()),
    }


def _exact_ffn(
    converted: ConvertedModel, layer: int, x_TD: Tensor, mask_TN: Tensor
) -> Float[Tensor, "T D"]:
    """Output of a dense layer's FFN whose neurons run as the mask says."""
    dense = converted.dense
    names = [dense.family.ffn_tensor(layer, name) for name in ("gate", "up", "down")]
    activation = dense.family.ffn(dense.family.layers(dense.model)[layer]).activation
    exact_TD = binary_gate_ffn(x_TD, mask_TN, _weights_like(converted, names, x_TD), activation)
    converted.tensors.forget()
    return exact_TD


def _exact_output(
    converted: ConvertedModel, target: Target, layer: int, seen_TN: Tensor, mask_TN: Tensor
) -> Float[Tensor, "T D"]:
    """Output of a dense layer's attention whose heads run as the mask says."""
    names = [target.output_tensor(layer)]
    if converted.dense.traits.output_bias:
        names.append(names[0].replace("weight", "bias"))
    masked_TN = seen_TN * target.of_columns(mask_TN, converted.dense.config)
    exact_TD = F.linear(masked_TN, *_weights_like(converted, names, seen_TN))
    converted.tensors.forget()
    return exact_TD


def _weights_like(
    converted: ConvertedModel, names: Sequence[str], like: Tensor
) -> Iterator[Tensor]:
    """Tensors as the export has them, in dtype and on the device of another; read one by one."""
    for name in names:
        weight = converted.tensors.read(name)
        if not converted.keeps_dtypes:
            weight = weight.to(converted.dtype)
        yield weight.to(like)


def binary_gate_ffn(
    x_TD: Float[Tensor, "T D"],
    mask_TN: Bool[Tensor, "T N"],
    weights: Iterator[Tensor],
    activation: Activation = SILU,
) -> Float[Tensor, "T D"]:
    """(activation(x W_gate) * (x W_up) * mask) W_down; each weight is read when it is needed."""
    hidden_TN = activation.apply(F.linear(x_TD, next(weights)))
    hidden_TN = hidden_TN * F.linear(x_TD, next(weights))
    return F.linear(hidden_TN * mask_TN, next(weights))


def logits_of(model: Any, tokens_BT: Int[Tensor, "B T"]) -> Float[Tensor, "T V"]:
    """Logits of all tokens, row after row, as float32 on the CPU."""
    device = next(model.parameters()).device
    logits: Tensor = model(input_ids=tokens_BT.to(device), use_cache=False).logits
    return logits.flatten(0, 1).float().cpu()


def logits_error(
    logits_TV: Float[Tensor, "T V"], reference_TV: Float[Tensor, "T V"]
) -> Float[Tensor, " T"]:
    """Mean |logit difference| of each token, in standard deviations of the reference logits."""
    return (logits_TV - reference_TV).abs().mean(dim=1) / reference_TV.std()


def top1_agreement(logits_TV: Float[Tensor, "T V"], reference_TV: Float[Tensor, "T V"]) -> float:
    """Share of tokens with the same most likely next token."""
    return float((logits_TV.argmax(dim=1) == reference_TV.argmax(dim=1)).double().mean())


def sample_tokens(tokens_BT: Int[Tensor, "B T"], limit: int, context: int) -> Tensor:
    """At most `limit` tokens, in rows no longer than the context; refuses an empty text."""
    if tokens_BT.numel() == 0:
        raise UserError("No tokens are left for verification. Give more text.")
    length = min(tokens_BT.shape[1], context, limit)
    return tokens_BT[: max(1, limit // length), :length]


def routed(
    dense: DenseModel, layout: ExpertLayout, chosen: Mapping[int, Int[Tensor, "T K"]]
) -> AbstractContextManager[None]:
    """Within this context, each split layer of the layout's target runs the experts `chosen`."""
    target, family = TARGETS[layout.target], dense.family
    layers = family.layers(dense.model)

    def mask(layer: int, hidden: Tensor) -> Tensor:
        runs_TN = neuron_mask(chosen[layer].to(hidden.device), layout, layer)
        return hidden * target.of_columns(runs_TN, dense.config).view_as(hidden)

    return input_hooks({i: family.output(layers[i], target) for i in layout.moe_layers}, mask)


def neuron_mask(
    chosen_TK: Int[Tensor, "T K"], layout: ExpertLayout, layer: int
) -> Bool[Tensor, "T N"]:
    """Which units of a layer run for each token: R M^T as booleans (eq:moe_output)."""
    # The last two columns of R are of neurons that are always on, and of dropped ones.
    always_on = layout.num_experts
    shape = (len(chosen_TK), layout.num_experts + 2)
    runs_TE = torch.zeros(shape, dtype=torch.bool, device=chosen_TK.device)
    runs_TE.scatter_(1, chosen_TK, True)
    runs_TE[:, always_on] = True
    expert_N = layout.expert_of_neuron_LN[layer].to(chosen_TK.device)
    return runs_TE[:, columns_of(expert_N, layout.num_experts)]
