"""Peak memory of training steps at the widths of published models, beside the planner's, on a CPU.

    python benchmarks/simulated_memory.py    # whole models: results/simulated_memory.json

The project's own steps run on fake tensors, which have sizes and no values, on rank 0 of a fake
process group, and a dispatch mode adds up the storages that are alive on the GPU (torch's
`MemTracker` takes no frozen parameter). Whole models run by the default options, changed as the
commands change what a GPU of 80 GB would not hold. Tensors of the GPU and of the host have devices
of their own, so that a step fails that mixes them. Replaced is what depends on values: the tokens,
the solution and rounding of the assignment (of which the soft plan alone is made), the shift of the
routers' soft mask, and what a repair finds: it has an error, and every factorisation succeeds.
"""

import json
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dotmoe.common.distributed import fsdp_mesh, mesh
from dotmoe.common.sharded import local_part
from dotmoe.measure.inspection.accelerators import ACCELERATORS
from dotmoe.measure.inspection.planner import fit_to_memory
from dotmoe.measure.inspection.sizes import (
    Sizes,
    Step,
    gathered_parameters,
    repair_memory,
    step_memory,
)
from dotmoe.method.align import Alignment, LearnedAssignment
from dotmoe.method.config import AlignConfig, AssignmentConfig, FinetuneConfig, RepairConfig
from dotmoe.method.finetuning import Finetuning, Student
from dotmoe.method.granularity import Granularity
from dotmoe.method.masked import masked
from dotmoe.method.repair import by_layer, ffn_training, streams
from dotmoe.method.repair.refit import RIDGES
from dotmoe.method.state import AlignState
from dotmoe.method.transport import TransportPlan
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.family import family_of
from dotmoe.models.hooks import recomputing
from dotmoe.models.load import read_weights, whole_weights
from dotmoe.models.meta_model import meta_model
from dotmoe.models.on_disk import on_disk
from dotmoe.training.loop import adamw, update
from random_models import QWEN25_7B, Shape, llama_config
from rounds import keep

SHAPES = {
    "Qwen2.5-7B": replace(QWEN25_7B, context=8_192),
    "Llama-3-8B": Shape(4_096, 14_336, 32, 32, 8, 128_256, 8_192),
    "Qwen2.5-32B": Shape(5_120, 27_648, 64, 40, 8, 152_064, 8_192),
}
DEPTHS = (5, 6)
"""Numbers of layers that are simulated; from there on peaks are linear in them."""
GPU = torch.device("lazy")
"""Stands for a GPU: a device that fake tensors can be on without its hardware, beside the host."""


def step_of(sizes: Sizes, train: str, ranks: int = 1, at_once: int = 2, **how: Any) -> Step:
    """A step as the planner describes it, of two micro-batches; `train` may also be `repair`."""
    step: Any = {"train": train, "ranks": ranks, "seq_len": 2_048, "micro_batch_size": at_once}
    return Step(sizes=sizes, batch_size=2 * at_once * ranks, **step | how)


def sizes_of(shape: Shape, layers: int) -> Sizes:
    """Sizes of the first layers of a model; a quarter of its experts of 128 neurons runs."""
    experts = shape.ffn_width // 128
    split = Granularity(num_experts=experts, expert_size=128, active_experts=experts // 4)
    model = meta_model(llama_config(replace(shape, layers=layers)))
    return Sizes(model, (split,), stored=torch.bfloat16, written=torch.bfloat16)


def planned(step: Step) -> int:
    """The planner's peak, in bytes; of a repair without what is on the host."""
    kind: str = step.train
    if kind == "repair":
        items = dict(repair_memory(step.sizes, 0, step.weight_bytes))
        if step.sharded:  # rank 0 reads from disk what ranks had divided
            items["dense weights"] = step.weight_bytes * gathered_parameters(step.sizes)
        return sum(items.values())
    return sum(step_memory(step).values())


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes on the GPU of all storages that are alive, and their most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == GPU.type:
                self._track(local_part(tensor).untyped_storage())
        return result

    def resized(self, storage: Any, size: int) -> None:
        """Follow FSDP, which frees and restores a gathered weight by resizing its storage."""
        if id(storage) in self._sizes:
            self._change(id(storage), size)

    def _track(self, storage: Any) -> None:
        if id(storage) not in self._sizes:
            self._change(id(storage), storage.nbytes())
            weakref.finalize(storage, self._change, id(storage), None)

    def _change(self, key: int, size: int | None) -> None:
        self.now += (size or 0) - self._sizes.pop(key, 0)
        self.most = max(self.most, self.now)
        if size is not None:
            self._sizes[key] = size


class Tokens:
    """Blocks of text without end."""

    num_blocks = 10**9

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len

    def batch(self, step: int, size: int, seed: int, rank: int = 0, ranks: int = 1) -> Any:
        """Rows of one rank."""
        return torch.zeros(size // ranks, self.seq_len, dtype=torch.long)

    def answers_in_batch(self, *place: int) -> None:
        """No marks: every token counts."""


class Stored:
    """The tensors of a model on disk."""

    dtype = torch.bfloat16

    def __init__(self, dense: DenseModel) -> None:
        self.of_model = dense.model

    @classmethod
    def of(cls, dense: DenseModel) -> "Stored":
        """Those of a described model."""
        return cls(dense)

    def read(self, name: str) -> Tensor:
        """A tensor in host memory."""
        return torch.empty_like(self.of_model.get_parameter(name), device="cpu")

    def require_model(self, model: nn.Module) -> None:
        """They are those of the model itself."""

    def forget(self) -> None:
        """Nothing is kept."""


def simulated(step: Step) -> int:
    """Peak bytes on the GPU of rank 0."""
    with ExitStack() as stack:
        kind: str = step.train
        size = 1 if kind == "repair" else step.ranks  # several train a share each, with less memory
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        stack.callback(dist.destroy_process_group)
        ranks = mesh(GPU)  # a mesh knows its ranks by values
        of_fsdp = stack.enter_context(fsdp_mesh(GPU, shard=step.sharded))
        stack.enter_context(patch("dotmoe.method.align.mesh", lambda device: ranks))
        stack.enter_context(without_values())
        alive = stack.enter_context(counted())
        task: Any
        if kind == "repair":
            with torch.no_grad():
                _repair(step)
            return alive.most
        if step.train == "assignment":
            task = _alignment(step, ranks)
            stack.enter_context(masked(task.dense, task.maskings))
        else:
            task = _finetuning(step, ranks, of_fsdp)
        stack.enter_context(recomputing(task.dense, step.checkpointing))
        optimizer = adamw(task)
        alive.most = alive.now
        task.accumulate_gradients(0)  # two micro-batches: the second finds gradients
        update(optimizer, 1.0, torch.ones(()), 1.0)
        return alive.most


@contextmanager
def without_values() -> Iterator[None]:
    """Within this context tensors are fake, and what needs their values is replaced."""

    def plan(assignment: LearnedAssignment, tau: float) -> TransportPlan:
        affinity_lNE = local_part(assignment.affinity_LNE)
        zeros_lE = affinity_lNE.new_zeros(affinity_lNE.shape[::2])
        soft_lNE = (affinity_lNE / tau).softmax(-1)
        return TransportPlan(soft_lNE, zeros_lE.double(), zeros_lE[:, 0], 1)

    def rounded(assignment: LearnedAssignment, plan: TransportPlan) -> Tensor:
        return torch.zeros(assignment.affinity_LNE.shape[:2], dtype=torch.long, device=GPU)

    tensors = MagicMock()

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
        return output

    plain = torch.tensor

    def scalar(value: Any, **how: Any) -> Tensor:  # its device is written as that of other tensors
        is_scalar = "device" in how and isinstance(value, float)
        return torch.full((), value, **how) if is_scalar else plain(value, **how)

    with ExitStack() as stack:
        for place, name, value in (
            (torch.nn.functional, "scaled_dot_product_attention", attention),
            (LearnedAssignment, "plan", plan),
            (LearnedAssignment, "rounded", rounded),
            (torch, "tensor", scalar),
            (FakeTensor, "is_cuda", property(lambda tensor: tensor.device.type == GPU.type)),
            (FakeTensor, "tolist", lambda tensor: [0.0] * tensor.numel()),
            (FakeTensor, "__float__", lambda tensor: 0.5),
            # No factorisation fails, and there is an error to repair.
            (FakeTensor, "__bool__", lambda tensor: tensor.is_floating_point()),
            (ffn_training, "_MANY_TOKENS", 0),
            (streams, "_drawn", lambda blocks, _: torch.zeros(2, 3, blocks.seq_len).long()),
            (ffn_training, "_own_neurons", lambda layout, layer: layout),
            (Student, "_read", lambda *args: None),
            (nn.Module, "_apply", _replaced),
            (Tensor, "pin_memory", lambda tensor: tensor),
            (Tensor, "is_pinned", lambda tensor: True),
        ):
            stack.enter_context(patch.object(place, name, value))
        gpu = MagicMock(device_count=lambda: 8)  # streams and events
        stack.enter_context(patch("torch.lazy", gpu, create=True))
        of_torch: tuple[tuple[str, Any], ...] = (
            ("accelerator.current_stream", MagicMock()),
            ("is_autocast_enabled", lambda *device: False),  # some versions do not know the device
            ("distributed.fsdp._fully_shard._fully_shard._get_device_from_mesh", lambda mesh: GPU),
            ("optim.adam._get_value", lambda step: 1.0),
            ("optim.optimizer._get_foreach_kernels_supported_devices", lambda: [GPU.type]),
            ("optim.optimizer._get_fused_kernels_supported_devices", lambda: [GPU.type]),
        )
        for path, value in of_torch:
            stack.enter_context(patch(f"torch.{path}", value))
        for module in ("method.finetuning", "models.load"):
            stack.enter_context(patch(f"dotmoe.{module}.Tensors", tensors))
        stack.enter_context(patch("dotmoe.models.on_disk.Tensors", Stored))
        stack.enter_context(patch("dotmoe.models.load.fill_own_rows"))
        own = patch("dotmoe.method.align.own_rows", lambda x: slice(0, len(local_part(x))))
        stack.enter_context(own)
        stack.enter_context(patch("importlib.util.find_spec", lambda name: None))  # no Triton
        soft = patch(
            "dotmoe.method.router._sigmoids_that_sum_to_k", lambda logits_TE, k: logits_TE.sigmoid()
        )
        stack.enter_context(soft)
        stack.enter_context(FakeTensorMode())
        yield


def _replaced(module: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` with new parameters in place of the old: fake ones cannot be swapped."""
    for child in module.children():
        child._apply(change)  # type: ignore[no-untyped-call]
    for name, tensor in module._parameters.items():
        if tensor is not None:
            new = change(tensor.detach())
            module._parameters[name] = nn.Parameter(new, requires_grad=tensor.requires_grad)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else change(buffer)
    return module


@contextmanager
def counted() -> Iterator[Alive]:
    """Within this context, memory is counted."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: Any, size: int) -> Any:
        alive.resized(storage, size)
        return resize(storage, size)

    with patch.object(torch.UntypedStorage, "resize_", resized), Alive() as alive:
        yield alive


def _described(step: Step) -> DenseModel:
    config: Any = step.sizes.config
    model = meta_model(config, torch.bfloat16)
    return DenseModel(model=model, weights="meta", family=family_of(config), source="")


def _layout(sizes: Sizes) -> Any:
    split, widths = sizes.split, sizes.widths
    layers, neurons = widths.layers, torch.arange(widths.ffn)
    return SimpleNamespace(
        granularity=split,
        target=split.target,
        moe_layers=range(layers),
        num_experts=split.num_experts,
        active_experts=split.active_experts,
        router_LED=torch.zeros(layers, split.num_experts, widths.model, device=GPU),
        expert_of_neuron_LN=torch.zeros(layers, widths.ffn, dtype=torch.long),
        neurons_of_expert=lambda layer: neurons.view(-1, 128),
        shared_neurons=lambda layer: torch.arange(0),
    )


def _dense(step: Step, ranks: Any) -> DenseModel:
    dense = _described(step)
    if step.sharded and ranks is not None:
        model = read_weights(dense, GPU, torch.bfloat16, ranks)
    else:
        model = dense.model.to_empty(device=GPU)
    model = model.requires_grad_(False).eval()
    return replace(dense, model=model, weights="shards" if step.sharded else "memory")


def _repair(step: Step) -> None:
    """Repair every layer on a few tokens: those of a whole text are on the host."""
    blocks: Any = Tokens(step.seq_len)
    dense = on_disk(_described(step), GPU, torch.bfloat16) if step.sharded else _dense(step, None)
    both = streams.Streams(dense, (_layout(step.sizes),), blocks, RepairConfig())
    stored: Any = None
    solutions = by_layer._Solutions(dense, stored, RepairConfig(repair_epochs=1), 0, Path())
    solutions.metrics.append({"ridge": RIDGES[4]})
    for index in both.layers:
        with whole_weights(dense, index), streams.with_weights(dense.model) as replace_weights:
            both.advance_dense(index)
            with masked(dense, both.maskings.values(), only=[index]):
                found, _ = solutions.solution(both.advance_to(index, "ffn"))
                written = by_layer._part_of_change(dense, found, 0.8)
                stored = {name: weight.cpu() for name, weight in written.items()}
                replace_weights(by_layer._whole_change(dense, stored, 0.8))
                both.advance_masked(index)


def _alignment(step: Step, ranks: Any) -> Alignment:
    dense, (split,), widths = _dense(step, ranks), step.sizes.splits, step.sizes.widths
    state = AlignState(
        affinity_LNE=torch.zeros(widths.layers, widths.ffn, split.columns, device=GPU),
        router_LED=torch.zeros(widths.layers, split.num_experts, widths.model, device=GPU),
    )
    how = AlignConfig(batch_size=step.batch_size, micro_batch_size=step.micro_batch_size)
    blocks: Any = Tokens(step.seq_len)
    task = Alignment(dense, blocks, (state,), (split,), how, AssignmentConfig(), seed=0)
    for part in task.parts:  # a run keeps the start on the device only while it begins
        part.initial = None  # type: ignore[assignment]
    return task


def _finetuning(step: Step, ranks: Any, of_fsdp: Any) -> Finetuning:
    how = FinetuneConfig(
        train=step.train,  # type: ignore[arg-type]
        batch_size=step.batch_size,
        micro_batch_size=step.micro_batch_size,
        offload=step.offload,
        kl_weight=float(step.distils),
    )
    blocks: Any = Tokens(step.seq_len)
    student = Student(_described(step), _layout(step.sizes), how, of_fsdp, seed=0)
    teacher = _dense(step, ranks) if step.distils and step.trains_weights else None
    return Finetuning(student, teacher, blocks, how, seed=0)


def compared(model: str, step: Step) -> dict[str, Any]:
    """Simulated and planned peak of a whole model; it is linear in the layers."""
    few, more = (
        simulated(replace(step, sizes=sizes_of(SHAPES[model], layers))) for layers in DEPTHS
    )
    peak = few + (SHAPES[model].layers - DEPTHS[0]) * (more - few)
    names = ("train", "ranks", "sharded", "offload", "checkpointing", "micro_batch_size")
    row = {name: getattr(step, name) for name in (*names, "seq_len", "distils", "on_host")}
    return {"model": model, **row, "simulated": peak, "planned": planned(step)} | {
        "ratio": planned(step) / peak
    }


def of_each_kind(layers: int) -> list[Step]:
    """Steps of the first layers of a 7B: each training without and with checkpointing, repairs."""
    divided = {"ranks": 8, "sharded": True}
    ways: list[tuple[str, dict[str, Any]]] = [
        ("assignment", {}),
        ("assignment", divided),
        ("everything", {}),
        ("everything", divided),
        ("everything", divided | {"offload": True, "distils": True}),
        ("experts", {"distils": True}),
    ]
    sizes = sizes_of(SHAPES["Qwen2.5-7B"], layers)
    steps = [
        step_of(sizes, train, checkpointing=again, **how)
        for (train, how), again in product(ways, (False, True))
    ]
    return steps + [step_of(sizes, "repair", **how) for how in ({}, divided)]


def at_defaults(model: str) -> list[Step]:
    """Repair and trainings by the default options, as the commands run them on 80 GB."""
    is_large = model == "Qwen2.5-32B"  # which --sharding auto divides, and one GPU does not hold
    sizes = sizes_of(SHAPES[model], SHAPES[model].layers)
    steps = [step_of(sizes, "repair", 8 if is_large else 1, sharded=is_large)]
    for ranks in (8,) if is_large else (1, 8):
        align = step_of(sizes, "assignment", ranks, 4, sharded=is_large)
        how = {"seq_len": 512, "sharded": ranks > 1, "distils": True}
        tune = step_of(sizes, "experts", ranks, 4 if ranks == 1 else 1, **how)
        steps += [fit_to_memory(each, ACCELERATORS["h100"].memory_bytes) for each in (align, tune)]
    return steps


def main() -> None:
    rows = []
    for model in SHAPES:
        for step in at_defaults(model):
            rows.append(compared(model, step))
            print(json.dumps(rows[-1]), flush=True)
    keep("results/simulated_memory.json", {"origin": "simulated", "rows": rows}, 0)


if __name__ == "__main__":
    main()
