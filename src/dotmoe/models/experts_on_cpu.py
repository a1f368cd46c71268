"""Experts of a stock MoE on a CPU: one product of all of them, where that is faster.

Transformers multiplies a few rows at a time with each chosen expert. From half of the experts on, a
CPU is faster with all rows and all experts at once, the unchosen ones times zero
(`benchmarks/experts_on_cpu.py`). Results are those of Transformers up to rounding.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

_OURS, _STOCK = "dotmoe_all_at_once", "grouped_mm"
_LEAST_SHARE = 0.5
"""Share of the experts that run, from which on all at once are faster."""
_NOT_PLAIN = ("has_bias", "has_post_expert_norm", "is_transposed", "_is_expert_parallel")
"""What Transformers says of experts that are more than three projections stored as rows."""
_MOST_VALUES = 1 << 25
"""Largest number of hidden values at once."""


def use_all_at_once(model: Any) -> None:
    """Let a model of Transformers that is in memory compute its experts so, where it can."""
    if getattr(model.config, "_experts_implementation", None) == _STOCK:
        ALL_EXPERTS_FUNCTIONS.register(_OURS, experts_forward)
        model.set_experts_implementation(_OURS)


def use_stock(model: Any) -> None:
    """Let a model compute its experts as Transformers does, to measure its speed."""
    if getattr(model.config, "_experts_implementation", None) == _OURS:
        model.set_experts_implementation(_STOCK)


def experts_forward(experts: Any, hidden_TD: Tensor, chosen_TK: Tensor, gate_TK: Tensor) -> Tensor:
    """Weighted sum of the chosen experts' outputs, [T, D]: an implementation for Transformers."""
    if not _is_faster(experts, hidden_TD, chosen_TK):
        output_TD: Tensor = ALL_EXPERTS_FUNCTIONS[_STOCK](experts, hidden_TD, chosen_TK, gate_TK)
        return output_TD
    num_experts, rows, _ = experts.gate_up_proj.shape
    gate_TE = hidden_TD.new_zeros(len(hidden_TD), num_experts, dtype=torch.float32)
    gate_TE.scatter_(1, chosen_TK, gate_TK.float())
    at_once = max(1, _MOST_VALUES // (num_experts * rows))
    parts = zip(torch.split(hidden_TD, at_once), torch.split(gate_TE, at_once), strict=True)
    return torch.cat([_all_experts(experts, *part) for part in parts])


def _is_faster(experts: Any, hidden_TD: Tensor, chosen_TK: Tensor) -> bool:
    """Whether all experts at once are possible and faster."""
    if hidden_TD.device.type != "cpu" or not experts.has_gate:
        return False
    if any(getattr(experts, name, False) for name in _NOT_PLAIN):
        return False
    return chosen_TK.shape[1] >= _LEAST_SHARE * len(experts.gate_up_proj)


def _all_experts(experts: Any, hidden_TD: Tensor, gate_TE: Tensor) -> Tensor:
    """All experts of some tokens; gates of the unchosen ones are zero."""
    num_tokens, num_experts = gate_TE.shape
    inner_TR = F.linear(hidden_TD, experts.gate_up_proj.flatten(0, 1))
    units = experts._apply_gate(inner_TR.view(num_tokens * num_experts, -1))
    units_TEI = units.view(num_tokens, num_experts, -1) * gate_TE[:, :, None]
    return F.linear(units_TEI.to(hidden_TD.dtype).flatten(1), _joined(experts.down_proj))


def _joined(down_EDI: nn.Parameter) -> Tensor:
    """The down projections of all experts side by side, [D, E I], without a copy of them.

    The first call changes the order of the parameter in memory, not its values or shape.
    """
    down_DEI = down_EDI.detach().permute(1, 0, 2)
    if not down_DEI.is_contiguous():
        down_DEI = down_DEI.contiguous()
        down_EDI.data = down_DEI.permute(1, 0, 2)
    return down_DEI.flatten(1)
