"""A dense decoder whose FFNs consist of experts, or that runs some query heads per token, or both.

This file needs only torch and transformers, and is part of every checkpoint of `model_type` dotmoe;
importing it from dotmoe registers its classes. The decoder is the stock one of the dense model's
family, with query and output projections (and FFNs) replaced. A router chooses k experts, which are
sets of heads, for each token; only their rows of W_Q and columns of W_O are multiplied, and their
outputs are summed with weight 1. Keys and values are those of the dense model, and so is the cache.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations import use_experts_implementation


class DotMoeConfig(PreTrainedConfig):
    """The dense model's config, and the sizes of the experts or the heads in each of them."""

    model_type = "dotmoe"
    keys_to_ignore_at_inference = ("cache", "past_key_values")

    dense_model_type: str = "llama"
    """Model type of the dense decoder; this config has all its keys."""
    heads_of_experts: Any = ()
    """For each layer one list: the query heads of expert 0, then of expert 1 and so on; None for a
    dense layer. Empty if attention is not split."""
    ffn_name: str = "mlp"
    """The family's name of the FFN in a layer."""
    first_dense_layers: int = 0
    """Leading layers that are not split."""
    head_experts: int = 0
    """Number of experts made of heads in a layer."""
    ffn_experts: int = 0
    """Number of experts of an FFN; 0: FFNs are dense."""
    ffn_expert_size: int = 0
    """Number of neurons of an FFN's expert."""
    ffn_shared_size: int = 0
    """Number of neurons of an FFN's shared expert, which runs for every token."""
    num_experts_per_tok: int = 0
    """Number of FFN experts that run per token; if FFNs are dense, of experts made of heads."""
    head_experts_per_tok: int = 0
    """Number of experts made of heads that run per token, if FFNs have experts, too."""

    def dense(self) -> Any:
        """The config of the decoder without experts."""
        values = {k: v for k, v in self.to_dict().items() if k not in ("model_type", "auto_map")}
        dense = CONFIG_MAPPING[self.dense_model_type](**values)
        dense._attn_implementation = self._attn_implementation
        return dense


class Router(nn.Module):
    """Linear map in float32, whatever the model's dtype; experts with the k largest logits run."""

    def __init__(self, experts: int, active: int, width: int) -> None:
        super().__init__()
        self.active = active
        self.weight = nn.Parameter(torch.empty(experts, width))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Indices of the chosen experts of each token, [T, K]."""
        return (x_TD.float() @ self.weight.float().T).topk(self.active, dim=1).indices


class HeadQueries(nn.Module):
    """Queries of the chosen experts' heads, [..., N d_h]; zeros where a head does not run."""

    def __init__(self, dense: nn.Linear, config: DotMoeConfig, layer: int, *, whole: bool) -> None:
        super().__init__()
        experts, width = config.head_experts, dense.in_features
        numbers = torch.tensor(config.heads_of_experts[layer], device="cpu").view(experts, -1)
        self.num_heads, self.numbers = numbers.numel(), numbers
        rows = dense.out_features // experts
        active = config.head_experts_per_tok if config.ffn_experts else config.num_experts_per_tok
        self.router = Router(experts, active, width)
        # If one norm spans all queries, all are computed.
        shape = (dense.out_features,) if whole else (experts, rows)
        self.weight = nn.Parameter(torch.empty(*shape, width))
        self.bias = None if dense.bias is None else nn.Parameter(torch.empty(shape))
        self.chosen_TK = self.heads_TH = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., N d_h]; the routing is kept for `HeadOutputs`."""
        x_TD = x.reshape(-1, x.shape[-1])
        self.chosen_TK = chosen_TK = self.router(x_TD)
        numbers = self.numbers.to(x.device)
        if not x.is_meta:  # servers trace the model there
            self.numbers = numbers
        self.heads_TH = numbers[chosen_TK].flatten(1)
        if self.weight.dim() == 2:
            return F.linear(x, self.weight, self.bias)
        rows_TKR = by_expert(x_TD, chosen_TK, self.weight)
        if self.bias is not None:
            rows_TKR = rows_TKR + self.bias[chosen_TK]
        rows_THC = rows_TKR.reshape(*self.heads_TH.shape, -1)
        all_TNC = rows_THC.new_zeros(len(x_TD), self.num_heads, rows_THC.shape[-1])
        places = self.heads_TH.unsqueeze(-1).expand_as(rows_THC)
        return all_TNC.scatter(1, places, rows_THC).view(*x.shape[:-1], -1)


class HeadOutputs(nn.Module):
    """Output projection of the chosen experts' heads, summed; reads the concatenated heads."""

    def __init__(self, dense: nn.Linear, queries: HeadQueries) -> None:
        super().__init__()
        experts = len(queries.numbers)
        shape = (experts, dense.out_features, dense.in_features // experts)
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = None if dense.bias is None else nn.Parameter(torch.empty(dense.out_features))
        self.queries = (queries,)  # in a tuple: not registered a second time

    def forward(self, heads: Tensor) -> Tensor:
        """Map [..., N d_h] to [..., D]."""
        (queries,) = self.queries
        all_TNC = heads.reshape(len(queries.heads_TH), queries.num_heads, -1)
        places = queries.heads_TH.unsqueeze(-1).expand(-1, -1, all_TNC.shape[-1])
        rows_TKR = all_TNC.gather(1, places).reshape(*queries.chosen_TK.shape, -1)
        outputs_TKD = by_expert(rows_TKR, queries.chosen_TK, self.weight)
        output_TD = outputs_TKD.float().sum(dim=1).to(heads.dtype)
        if self.bias is not None:
            output_TD = output_TD + self.bias
        return output_TD.view(*heads.shape[:-1], -1)


@use_experts_implementation
class Experts(nn.Module):
    """FFN experts in the layout that the stock expert implementations of Transformers run."""

    def __init__(self, config: DotMoeConfig, act_fn: nn.Module) -> None:
        super().__init__()
        self.num_experts = experts = config.ffn_experts
        size, width = config.ffn_expert_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * size, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, size))
        self.act_fn = act_fn

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts' outputs for each token, as in Mixtral."""
        gate, up = by_expert(hidden_states, top_k_index, self.gate_up_proj).chunk(2, dim=-1)
        outputs_TKD = by_expert(self.act_fn(gate) * up, top_k_index, self.down_proj)
        return (outputs_TKD * top_k_weights.unsqueeze(-1)).sum(dim=1)


class SharedExpert(nn.Module):
    """Neurons that run for every token."""

    def __init__(self, config: DotMoeConfig, act_fn: nn.Module) -> None:
        super().__init__()
        size, width = config.ffn_shared_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(2 * size, width))
        self.down_proj = nn.Parameter(torch.empty(width, size))
        self.act_fn = act_fn

    def forward(self, x_TD: Tensor) -> Tensor:
        """Map [T, D] to [T, D]."""
        gate, up = F.linear(x_TD, self.gate_up_proj).chunk(2, dim=-1)
        return F.linear(self.act_fn(gate) * up, self.down_proj)


class ExpertFFN(nn.Module):
    """An FFN made of experts, whose outputs are summed with weight 1."""

    def __init__(self, config: DotMoeConfig, act_fn: nn.Module) -> None:
        super().__init__()
        active, width = config.num_experts_per_tok, config.hidden_size
        self.router = Router(config.ffn_experts, active, width)
        self.experts = Experts(config, act_fn)
        self.shared = SharedExpert(config, act_fn) if config.ffn_shared_size else None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        x_TD = x.reshape(-1, x.shape[-1])
        chosen_TK = self.router(x_TD)
        output: Tensor = self.experts(x_TD, chosen_TK, torch.ones_like(chosen_TK, dtype=x.dtype))
        if self.shared is not None:
            output = output + self.shared(x_TD)
        return output.view(x.shape)


def by_expert(rows: Tensor, chosen_TK: Tensor, weight_EBA: Tensor) -> Tensor:
    """Multiply each token's rows, [T, A] or [T, K, A], by its experts' weights: [T, K, B].

    Rows are sorted by expert, so that each expert multiplies only its own rows.
    """
    num_tokens, active = chosen_TK.shape
    expert_R = chosen_TK.flatten()
    order_R = expert_R.argsort(stable=True)
    rows_RA = rows[order_R // active] if rows.dim() == 2 else rows.flatten(0, 1)[order_R]
    counts_E = torch.bincount(expert_R, minlength=len(weight_EBA))
    is_aligned = all(size * rows.dtype.itemsize % 16 == 0 for size in weight_EBA.shape[1:])
    if rows.is_cuda and is_aligned and hasattr(F, "grouped_mm"):
        ends_E = counts_E.cumsum(0).to(torch.int32)
        out_RB = F.grouped_mm(rows_RA, weight_EBA.transpose(1, 2), offs=ends_E)
    else:
        parts = zip(torch.split(rows_RA, counts_E.tolist()), weight_EBA, strict=True)
        out_RB = torch.cat([part_RA @ weight.T for part_RA, weight in parts if len(part_RA)])
    back_R = torch.empty_like(order_R)
    back_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    return out_RB[back_R].view(num_tokens, active, -1)


def put_experts(layers: Any, config: DotMoeConfig) -> None:
    """Replace the FFNs and projections of a stock decoder's layers that the config splits."""
    heads = config.heads_of_experts
    for index, layer in enumerate(layers):
        if index < config.first_dense_layers or (heads and heads[index] is None):
            continue
        if heads:
            attention = layer.self_attn
            q_norm, rows = getattr(attention, "q_norm", None), attention.q_proj.out_features
            whole = q_norm is not None and q_norm.weight.numel() == rows
            attention.q_proj = HeadQueries(attention.q_proj, config, index, whole=whole)
            attention.o_proj = HeadOutputs(attention.o_proj, attention.q_proj)
        if config.ffn_experts:
            # LFM2 has no module for its activation function.
            parts = [*getattr(layer, config.ffn_name).children(), nn.SiLU()]
            act_fn = next(part for part in parts if not isinstance(part, nn.Linear))
            setattr(layer, config.ffn_name, ExpertFFN(config, act_fn))


class DotMoeModel(PreTrainedModel):
    """Makes the stock decoder of a family with experts, without a head; vLLM asks for it."""

    config_class = DotMoeConfig
    _supports_attention_backend = True

    def __new__(cls, config: DotMoeConfig) -> Any:
        """The decoder, an instance of the family's class."""
        dense = config.dense()
        config._experts_implementation = config._experts_implementation or "eager"
        decoder = MODEL_MAPPING[type(dense)](dense)
        put_experts(decoder.layers, config)
        return decoder


class DotMoeForCausalLM(PreTrainedModel, GenerationMixin):
    """The stock decoder of a family with experts made of neurons or heads, and its LM head."""

    config_class = DotMoeConfig
    base_model_prefix = "model"
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _skip_keys_device_placement = ("cache", "past_key_values")

    def __init__(self, config: DotMoeConfig) -> None:
        self.stock = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[config.dense_model_type]]
        self._supports_sdpa = self.stock._supports_sdpa  # has no soft cap, which Gemma 2 needs
        super().__init__(config)
        dense = self.stock(config.dense())
        self.model, self.lm_head = dense.model, dense.lm_head
        self.vocab_size = config.vocab_size
        self.logit_scale = getattr(dense, "logit_scale", None)
        put_experts(self.model.layers, config)
        self.post_init()

    def forward(
        self, input_ids: Any = None, labels: Any = None, logits_to_keep: Any = 0, **kwargs: Any
    ) -> Any:
        """Run as the family's class does, which knows how to make its logits."""
        return self.stock.forward(
            self, input_ids=input_ids, labels=labels, logits_to_keep=logits_to_keep, **kwargs
        )

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: the decoder initialises its own modules; experts and routers are always read."""


if __name__ == "dotmoe.models.modeling_dotmoe":  # Transformers registers a copy itself
    AutoConfig.register(DotMoeConfig.model_type, DotMoeConfig)
    AutoModel.register(DotMoeConfig, DotMoeModel)
    AutoModelForCausalLM.register(DotMoeConfig, DotMoeForCausalLM)
