"""DISP-LLM: learned masks on the stream features that attention and FFN read and write.

The published method: each layer has five selections, of the features that attention reads and
writes, of those that the FFN reads and writes, and of its neurons; the stream keeps its width, so
selections need not agree. A network computes their logits from fixed random inputs: a bidirectional
GRU, a norm, GELU, and one linear map per selection. A gate is sigmoid((logit + 3 + g) / 0.4) with
Gumbel noise g; only the network is trained, by AdamW, on the next-token loss of the softly gated
model plus 6 |ln(R / p)|: R is the share of the layers' weights that a second sample keeps, rounded
with the gradient of the unrounded one, and p the wanted share. Here one threshold over all logits
meets the budget in the end, instead of one more sample, and leaves no selection empty; neurons are
gated once, not in both branches. All biases stay except those of attention's output. No stock
config can describe such selections, so the checkpoint holds zeros.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hooks import input_hooks, recomputing
from dotmoe.models.targets import TARGETS
from dotmoe.rivals.pruning.contract import Pruned, PruneInputs, linears_of, threshold

_OPEN, _SOFTNESS, _BUDGET_WEIGHT = 3.0, 0.4, 6.0
_LR, _WEIGHT_DECAY = 1e-3, 0.05


class _Selections(NamedTuple):
    """The five selections of a layer, or what is counted or computed of each."""

    reads: Any
    """Of the features of the stream that attention reads."""
    writes: Any
    ffn_reads: Any
    neurons: Any
    ffn_writes: Any


class _Network(nn.Module):
    """The network that computes the logits of every selection."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("start", torch.randn(len(widths), 32))
        self.gru = nn.GRU(32, 64, bidirectional=True)
        self.norm = nn.LayerNorm(128)
        self.heads = nn.ModuleList(nn.Linear(128, width, bias=False) for width in widths)

    def forward(self) -> list[Tensor]:
        hidden = F.gelu(self.norm(self.gru(self.start)[0]))
        return [head(row) for head, row in zip(self.heads, hidden, strict=True)]


def disp_llm(inputs: PruneInputs) -> Pruned:
    """Learn the selections, and set to zero all weights outside them."""
    dense = inputs.dense
    size = inputs.dense.widths.model
    widths = [size, size, size, dense.widths.ffn, size] * dense.widths.layers
    if inputs.excess <= 0:
        return Pruned(0, {"selected": widths})
    whole = int(kept_parameters(dense, widths))
    with torch.random.fork_rng():
        torch.manual_seed(inputs.seed)
        logits = _trained(inputs, _Network(widths).to(dense.device), whole)

    def above(bound: float) -> list[Tensor]:
        return [(each > bound) | (each == each.max()) for each in logits]

    def removed(bound: float) -> int:
        return whole - int(kept_parameters(dense, [mask.sum() for mask in above(bound)]))

    bound = threshold(logits, removed, inputs.excess)
    masks = above(bound)
    for layer, reading, output, kept in _by_layer(dense, masks):
        gate, up, down = dense.family.ffn(layer)[:3]
        for linear in reading:
            linear.weight.mul_(kept.reads)
        for parameter in output.parameters():
            parameter.mul_(kept.writes[:, None] if parameter.dim() == 2 else kept.writes)
        for part in (gate, up):
            part.weight.mul_(kept.neurons[:, None] * kept.ffn_reads)
        down.weight.mul_(kept.ffn_writes[:, None] * kept.neurons)
    return Pruned(removed(bound), {"selected": [int(mask.sum()) for mask in masks]})


def kept_parameters(dense: DenseModel, selected: Sequence[Any]) -> Any:
    """Number of layer weights that are kept, given how much each selection of each layer keeps."""
    number = 0
    for _, reading, output, kept in _by_layer(dense, selected):
        attended = kept.reads * sum(linear.out_features for linear in reading)
        attended = attended + kept.writes * output.in_features
        number += attended + kept.neurons * (2 * kept.ffn_reads + kept.ffn_writes)
    return number


@torch.enable_grad()
def _trained(inputs: PruneInputs, network: nn.Module, whole: int) -> list[Tensor]:
    """Logits of every selection, from the trained network."""
    dense = inputs.dense
    model = cast(Any, inputs.dense.model)
    optimizer = torch.optim.AdamW(network.parameters(), lr=_LR, weight_decay=_WEIGHT_DECAY)
    wanted = math.log(max(1, whole - inputs.excess) / whole)
    for step in range(inputs.steps):
        tokens_BT = inputs.batch(step).to(dense.device)
        logits = network()
        soft = [_gate(each) for each in logits]
        kept = [(each.round() - each.detach() + each).sum() for each in soft]
        excess = (kept_parameters(dense, kept) / whole).log() - wanted
        optimizer.zero_grad()
        with recomputing(dense), gated(dense, [_gate(each) for each in logits]):
            loss = model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
            (loss + _BUDGET_WEIGHT * excess.abs()).backward()
        optimizer.step()
        inputs.on_progress(step + 1, inputs.steps, f"loss {loss.item():.3f}")
    return [each.detach() for each in network()]


def _gate(logits: Tensor) -> Tensor:
    noise = -(-torch.rand_like(logits).clamp_min(1e-20).log()).log()
    return ((logits + _OPEN + noise) / _SOFTNESS).sigmoid()


@contextmanager
def gated(dense: DenseModel, gates: Sequence[Tensor]) -> Iterator[None]:
    """Within this context, the features of each selection are multiplied by its gates."""

    def weigh(gate: Tensor, *called: Any) -> Tensor:
        """Multiply a module's input (before it runs) or its output (after) by the gate."""
        x: Tensor = called[-1]
        return x * gate.to(x.dtype)

    family = dense.family
    target = TARGETS["ffn"]
    with ExitStack() as hooks:
        for layer, reading, output, gate_of in _by_layer(dense, gates):
            ffn, down = family.block(layer, target), family.output(layer, target)
            before: list[tuple[nn.Module, Any]] = [(linear, gate_of.reads) for linear in reading]
            before += [(ffn, gate_of.ffn_reads), (down, gate_of.neurons)]
            for module, gate in before:
                hooks.enter_context(input_hooks({0: module}, partial(weigh, gate)))
            for written, gate in ((output, gate_of.writes), (ffn, gate_of.ffn_writes)):
                hooks.enter_context(written.register_forward_hook(partial(weigh, gate)))
        yield


def _by_layer(
    dense: DenseModel, selections: Sequence[Any]
) -> Iterator[tuple[nn.Module, list[nn.Linear], nn.Linear, _Selections]]:
    """Yield each layer, attention's input and output projections, and its five selections."""
    for index, layer in enumerate(dense.family.layers(dense.model)):
        attention: Any = layer.get_submodule("self_attn")
        reading = [each for each in linears_of(attention) if each is not attention.o_proj]
        five = _Selections(*selections[5 * index : 5 * index + 5])
        yield layer, reading, attention.o_proj, five
