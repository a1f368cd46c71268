"""The residual streams of a dense and of its masked model, which pose the problem of each layer."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dotmoe.common.device import has_room, memory_of
from dotmoe.common.distributed import gathered, num_ranks, raise_on_all_ranks, rank
from dotmoe.common.errors import UserError
from dotmoe.common.numbers import ceil_div
from dotmoe.method.config import RepairConfig
from dotmoe.method.granularity import Splits
from dotmoe.method.layout import ALWAYS_ON, DROPPED, Layouts, splits_in
from dotmoe.method.masked import maskings_of
from dotmoe.method.repair.problem import LARGEST_WEIGHT, FFNTask, LayerProblem, tokens_at_once
from dotmoe.method.router import Routing
from dotmoe.method.sparse import SparseFFN
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hooks import computing
from dotmoe.models.load import whole_weights
from dotmoe.models.stream import TOKENS_AT_ONCE, Stream
from dotmoe.models.targets import TARGETS
from dotmoe.text.blocks import TokenBlocks

HELD_OUT_ROWS = 8
"""One row of text of so many is held out."""
_TOKENS_AN_INPUT = 40
"""Default tokens for each input of the output projection."""
_TENSORS_OF_TARGET = {"attention": 1, "ffn": 2}
"""Tensors as large as a stream that `Streams` keeps for each split target, beside two streams."""


def repair_tokens(config: RepairConfig, splits: Splits, dense_config: Any) -> int:
    """Number of tokens: `repair_tokens`, or the default for the projections of these splits."""
    inputs = [TARGETS[split.target].inputs(dense_config) for split in splits]
    return config.repair_tokens or _TOKENS_AN_INPUT * max(inputs)


@contextmanager
def with_weights(model: nn.Module) -> Iterator[Callable[[Mapping[str, Tensor]], None]]:
    """Within this context, the function that it yields gives parameters other values, by name.

    Afterwards, also after an exception, the model has its own again.
    """
    own = dict[nn.Parameter, Tensor]()

    def replace(weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            parameter = model.get_parameter(name)
            own.setdefault(parameter, parameter.data)
            parameter.data = weight.to(parameter)

    try:
        yield replace
    finally:
        for parameter, values in own.items():
            parameter.data = values


class Streams:
    """The residual streams of a dense model and of its masked model, side by side.

    Both begin before the first split layer. For each layer from there on, in their order, call
    `advance_dense`; then within `masked`, `advance_to` each split target, whose new weights the
    model must have from then on, and `advance_masked`.
    """

    def __init__(
        self, dense: DenseModel, layouts: Layouts, blocks: TokenBlocks, config: RepairConfig
    ) -> None:
        self._model = dense
        self._device = dense.device
        self._traits = dense.traits
        self._layers = dense.family.layers(dense.model)
        self._layouts = {layout.target: layout for layout in layouts}
        self.maskings = {masking.target: masking for masking in maskings_of(dense, *layouts)}
        self.targets = [name for name in ("attention", "ffn") if name in self._layouts]
        """Split parts of a layer, in the order in which data passes them."""
        wanted = repair_tokens(config, splits_in(layouts), dense.config)
        drawn = raise_on_all_ranks(lambda: _drawn(blocks, wanted))
        self.num_tokens = sum(rows_BT.numel() for rows_BT in drawn)
        (fitted_BT, counts_B), (heldout_BT, heldout_counts_B) = map(_own_rows, drawn)
        tokens_BT = torch.cat([fitted_BT, heldout_BT])
        self._num_fitted = len(fitted_BT)
        self._counts_B = torch.cat([counts_B, heldout_counts_B])
        """Whether each row of this rank counts: False for those that only fill its share."""
        self._parts = _parts(len(tokens_BT), self._num_fitted, blocks.seq_len)
        self._first = layouts[0].moe_layers.start
        stream = Stream(dense, tokens_BT, self._parts)
        on_host_BTD = torch.empty_like(stream.hidden_BTD)
        tensors = 2 + sum(_TENSORS_OF_TARGET[name] for name in self.targets)
        keep = _keeper(self._device, tensors * on_host_BTD.nbytes)
        self._keep_inputs = _keeper(self._device, 2 * on_host_BTD.nbytes)
        stream.hidden_BTD = keep(stream.hidden_BTD)
        self._dense = self._before_split_layers(stream)
        self._masked = self._dense.clone()
        self._masked.hidden_BTD = keep(self._masked.hidden_BTD)
        self._attended_BTD: Tensor | None = None
        """The dense stream between attention and FFN of the layer that it has passed last; None if
        attention is not split."""
        self._ffn_task: FFNTask | None = None
        """Of the FFN before which the masked stream stands; None if FFNs are not split."""
        if "attention" in self.targets:
            self._attended_BTD = keep(torch.empty_like(on_host_BTD))
        if "ffn" in self.targets:
            self._ffn_task = FFNTask(
                inputs_BTD=self._keep_inputs(torch.empty_like(on_host_BTD)),
                wanted_BTD=self._keep_inputs(torch.empty_like(on_host_BTD)),
            )

    @property
    def layers(self) -> range:
        """The split layers."""
        return range(self._first, len(self._layers))

    def _before_split_layers(self, stream: Stream) -> Stream:
        """The stream behind the leading dense layers."""
        for index in range(self._first):
            with whole_weights(self._model, index):
                stream.advance(index)
        return stream

    def advance_dense(self, index: int) -> None:
        """Run the dense stream through a layer, which must have its own weights and no masks."""
        if self._attended_BTD is not None:
            for part in self._parts:
                self._attended_BTD[part], _ = self._before_ffn(self._dense, index, part)
        self._dense.advance(index)

    def advance_to(self, index: int, target: str) -> LayerProblem:
        """Pose the problem of a part of a layer, before which the masked stream stands then.

        The dense stream must have passed the layer, and the layer must be masked.
        """
        if target == "ffn":
            task = self._advance_to_ffn(index)
            dense_BTD = self._dense.hidden_BTD
            lacking = partial(self._ffn_lacks, index, task)
        else:
            assert self._attended_BTD is not None
            task = None
            dense_BTD = self._attended_BTD
            lacking = partial(self._attention_lacks, index, dense_BTD)
        part = TARGETS[target]
        family = self._model.family
        layer = self._layers[index]
        norm = family.norm_after(layer, part)
        return LayerProblem(
            layer=index,
            target=part,
            layout=self._layouts[target],
            block=family.block(layer, part),
            name=family.own_name(f"model.layers.{index}.{part.module}"),
            output=family.output(layer, part),
            output_name=family.own_name(part.output_tensor(index)),
            norm=norm,
            gain_D=family.gain(norm) if self._traits.norms_after else None,
            ffn=family.ffn(layer),
            group_of_N=part.of_columns(self._groups(index, target), self._model.config),
            parts=self._parts,
            num_fitted=self._num_fitted,
            weight_BT=self._keep_inputs(self._token_weights(dense_BTD)),
            ffn_task=task,
            lacking=lacking,
        )

    def _groups(self, index: int, target: str) -> Tensor:
        """Group of each unit as of `LayerProblem.group_of_N`."""
        layout = self._layouts[target]
        expert_N = layout.expert_of_neuron_LN[index].to(self._device)
        group_N = torch.where(expert_N == DROPPED, layout.num_experts, expert_N)
        return torch.where(expert_N == ALWAYS_ON, layout.num_experts + 1, group_N)

    def advance_masked(self, index: int) -> None:
        """Run the masked stream from where it stands in a layer to its end."""
        if self._ffn_task is not None:
            self._advance_through_ffn(index, self._ffn_task)
        else:
            self._masked.advance(index)

    def _before_ffn(self, stream: Stream, index: int, part: slice) -> tuple[Tensor, Tensor]:
        """Some rows of a stream after a layer whose FFN gives nothing, and the FFN's inputs."""
        inputs = list[Tensor]()

        def nothing(x: Tensor) -> Tensor:
            inputs.append(x)
            return torch.zeros_like(x)

        block = self._model.family.block(self._layers[index], TARGETS["ffn"])
        with computing({block: nothing}):
            return stream.after(index, part), inputs[0]

    def _advance_to_ffn(self, index: int) -> FFNTask:
        """Run the masked stream through a layer but for its FFN, and give that FFN's task."""
        task = self._ffn_task
        assert task is not None
        for part in self._parts:
            reached_BTD, x_BTD = self._before_ffn(self._masked, index, part)
            task.wanted_BTD[part] = self._missing(self._dense.hidden_BTD[part], reached_BTD)
            self._masked.hidden_BTD[part] = reached_BTD
            task.inputs_BTD[part] = x_BTD
        return task

    def _advance_through_ffn(self, index: int, task: FFNTask) -> None:
        """Add what the FFN gives for its inputs to the masked stream."""
        family = self._model.family
        layer = self._layers[index]
        layout = self._layouts["ffn"]
        norm = family.norm_after(layer, TARGETS["ffn"])
        routing = Routing(active_experts=layout.active_experts)
        experts = SparseFFN(family.ffn(layer), layout, index, routing)
        size = tokens_at_once(self._device)
        inputs = torch.split(task.inputs_BTD.flatten(0, 1), size)
        streams = torch.split(self._masked.hidden_BTD.flatten(0, 1), size)
        for x_TD, hidden_TD in zip(inputs, streams, strict=True):
            x_TD = x_TD.to(self._device, non_blocking=True)
            output_TD = norm(experts(x_TD)) * self._traits.multipliers.residual
            hidden_TD.copy_(hidden_TD.to(self._device, non_blocking=True) + output_TD)

    def _missing(self, dense_BTD: Tensor, reached_BTD: Tensor) -> Tensor:
        """What a part of a layer has to add to its output, before the residual multiplier."""
        dense_BTD = dense_BTD.to(self._device, non_blocking=True)
        return (dense_BTD.float() - reached_BTD.float()) / self._traits.multipliers.residual

    def _attention_lacks(self, index: int, attended_BTD: Tensor, part: slice) -> Tensor:
        """What attention's output lacks, as of `LayerProblem.lacking`."""
        reached_BTD, _ = self._before_ffn(self._masked, index, part)
        return self._missing(attended_BTD[part], reached_BTD)

    def _ffn_lacks(self, index: int, task: FFNTask, part: slice) -> Tensor:
        """What the FFN's output lacks, as of `LayerProblem.lacking`."""
        family = self._model.family
        layer = self._layers[index]
        block = family.block(layer, TARGETS["ffn"])
        norm = family.norm_after(layer, TARGETS["ffn"])
        output_BTD: Tensor = norm(block(task.inputs_BTD[part].to(self._device)))
        return task.wanted_BTD[part].to(output_BTD).float() - output_BTD

    def _token_weights(self, dense_BTD: Tensor) -> Tensor:
        """Token weights [B, T]: 1 / mean square of the stream, over its median and at most 10."""
        parts = [
            1 / dense_BTD[part].to(self._device).float().square().mean(2) for part in self._parts
        ]
        weight_BT = torch.cat(parts).cpu()
        counts_B1 = self._counts_B[:, None]
        median = torch.cat(gathered(weight_BT.where(counts_B1, torch.nan))).nanmedian()
        return (weight_BT / median).clamp(max=LARGEST_WEIGHT) * counts_B1


def _keeper(device: torch.device, num_bytes: int) -> Callable[[Tensor], Tensor]:
    """A function that moves a tensor to where this many bytes of a GPU's streams are kept.

    They are kept there if they take at most half of its free memory. Else they are on the host: in
    pinned memory, if its size, which torch rounds up to a power of two, stays below half.
    """
    if has_room(device, num_bytes):
        return lambda values: values.to(device)
    if device.type == "cuda" and 4 * num_bytes * num_ranks() <= memory_of(torch.device("cpu")):
        return lambda values: values.pin_memory()
    return lambda values: values


def _parts(num_rows: int, num_fitted: int, seq_len: int) -> list[slice]:
    """Rows that run at once, up to 4,096 tokens: either all fitted or all held out."""
    rows = max(1, TOKENS_AT_ONCE // seq_len)
    fitted = [slice(row, min(row + rows, num_fitted)) for row in range(0, num_fitted, rows)]
    return fitted + [slice(row, row + rows) for row in range(num_fitted, num_rows, rows)]


def _drawn(blocks: TokenBlocks, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Rows drawn evenly over the text: those to fit, and every 8th, which is held out."""
    if blocks.num_blocks < 2:
        raise UserError(
            f"the text gives 1 block of {blocks.seq_len} tokens, but a repair needs two, one of "
            "them held out to choose its penalty. Give more text, or lower seq_len."
        )
    tokens_BT = blocks.drawn(max(num_tokens, 2 * blocks.seq_len))
    first = min(len(tokens_BT), HELD_OUT_ROWS) - 1
    is_heldout_B = torch.zeros(len(tokens_BT), dtype=torch.bool)
    is_heldout_B[first::HELD_OUT_ROWS] = True
    return tokens_BT[~is_heldout_B], tokens_BT[is_heldout_B]


def _own_rows(rows_BT: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's rows, as many as every other rank has, and whether each counts.

    Rows that only fill up its share do not.
    """
    ranks = num_ranks()
    num = len(rows_BT)
    number_B = torch.arange(rank(), ceil_div(num, ranks) * ranks, ranks)
    return rows_BT[number_B % num], number_B < num
