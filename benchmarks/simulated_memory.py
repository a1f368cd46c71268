"""Peak memory of training steps at the widths of published models, beside the planner's, on a CPU.

    python benchmarks/simulated_memory.py              # whole models: results/simulated_memory.json
    python benchmarks/simulated_memory.py --layers 2   # two layers of a 7B, as JSON

The project's own steps run on fake tensors, which have sizes and no values, on rank 0 of a fake
process group, and a dispatch mode adds up the storages that are alive (torch's `MemTracker` takes
no frozen parameter). From some depth on peaks are linear in the number of layers, so ten and eleven
layers give that of the whole model. Replaced is what depends on values: the tokens, the solution
and rounding of the assignment (of which the soft plan alone is made) and the shift of the routers'
soft mask. A repair is left out, because every layer of it decides by values.
"""

import argparse
import json
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from dotmoe.common.distributed import fsdp_mesh, local_part, mesh
from dotmoe.measure.inspection.sizes import Sizes, Step, step_memory
from dotmoe.method.align import Alignment, LearnedAssignment
from dotmoe.method.config import AlignConfig, AssignmentConfig, FinetuneConfig
from dotmoe.method.finetuning import Finetuning, Student
from dotmoe.method.granularity import Granularity
from dotmoe.method.layout import AlignState
from dotmoe.method.masked import masked
from dotmoe.method.transport import TransportPlan
from dotmoe.models.family import DenseModel, family_of, meta_model
from dotmoe.models.hooks import recomputing
from dotmoe.models.load import load_sharded
from dotmoe.training.loop import adamw, update
from rounds import keep

SHAPES: dict[str, tuple[Any, ...]] = {  # width, FFN width, layers, heads, their keys, vocabulary
    "Qwen2.5-7B": (Qwen2Config, 3_584, 18_944, 28, 28, 4, 152_064),
    "Llama-3-8B": (LlamaConfig, 4_096, 14_336, 32, 32, 8, 128_256),
    "Qwen2.5-32B": (Qwen2Config, 5_120, 27_648, 64, 40, 8, 152_064),
}


def config_of(name: str, layers: int | None = None) -> Any:
    """The config of a published model, or of its first `layers`."""
    kind, width, ffn, depth, heads, kv_heads, vocabulary = SHAPES[name]
    return kind(
        hidden_size=width,
        intermediate_size=ffn,
        num_hidden_layers=layers or depth,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=8_192,
        tie_word_embeddings=False,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One step to simulate: `train` is `assignment` for an alignment, else as for finetuning."""

    model: str
    train: str
    ranks: int = 1
    sharded: bool = False
    checkpointing: bool = False
    micro_batch_size: int = 2
    seq_len: int = 2_048

    def planned(self, layers: int | None = None) -> int:
        """The planner's peak, in bytes."""
        config = config_of(self.model, layers)
        sizes = Sizes(config, (split_of(config),), stored=torch.bfloat16, written=torch.bfloat16)
        step = Step(
            sizes=sizes,
            batch_size=2 * self.micro_batch_size * self.ranks,
            seq_len=self.seq_len,
            micro_batch_size=self.micro_batch_size,
            train=self.train,  # type: ignore[arg-type]
            on_cpu=True,
            checkpointing=self.checkpointing,
            ranks=self.ranks,
            sharded=self.sharded,
        )
        return sum(step_memory(step).values())


def split_of(config: Any) -> Granularity:
    """Experts of 128 neurons, a quarter of which run."""
    experts = config.intermediate_size // 128
    return Granularity(num_experts=experts, expert_size=128, active_experts=experts // 4)


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that operations made and that are alive, and their most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
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


def simulated(case: Case, layers: int) -> int:
    """Peak bytes of a step of a model of that many layers, on rank 0."""
    config = config_of(case.model, layers)
    with ExitStack() as stack:
        if case.ranks > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
            stack.callback(dist.destroy_process_group)
        device = torch.device("cpu")  # a mesh knows its ranks by values
        ranks = mesh(device)
        of_fsdp = stack.enter_context(fsdp_mesh(device, shard=case.sharded))
        stack.enter_context(patch("dotmoe.method.align.mesh", lambda device: ranks))
        stack.enter_context(without_values())
        alive = stack.enter_context(counted())
        task: Any
        if case.train == "assignment":
            task = _alignment(case, config, ranks)
            stack.enter_context(masked(task.dense, task.maskings))
        else:
            task = _finetuning(case, config, of_fsdp)
        stack.enter_context(recomputing(task.dense, case.checkpointing))
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

    def rounded(assignment: LearnedAssignment, plan: TransportPlan) -> torch.Tensor:
        return torch.zeros(assignment.affinity_LNE.shape[:2], dtype=torch.long)

    tensors = MagicMock()
    with ExitStack() as stack:
        for place, name, value in (
            (LearnedAssignment, "plan", plan),
            (LearnedAssignment, "rounded", rounded),
            (FakeTensor, "tolist", lambda tensor: [0.0] * tensor.numel()),
            (Student, "_read", lambda *args: None),
            (nn.Module, "_apply", _replaced),
        ):
            stack.enter_context(patch.object(place, name, value))
        for module in ("method.finetuning", "models.load"):
            stack.enter_context(patch(f"dotmoe.{module}.Tensors", tensors))
        stack.enter_context(patch("dotmoe.models.load.fill_own_rows"))
        own = patch("dotmoe.method.align.own_rows", lambda x: slice(0, len(local_part(x))))
        stack.enter_context(own)
        soft = patch("dotmoe.method.router._saturated", lambda logits_TE, k: logits_TE.sigmoid())
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


def _alignment(case: Case, config: Any, ranks: Any) -> Alignment:
    family, split, device = family_of(config), split_of(config), torch.device("cpu")
    layers = config.num_hidden_layers
    if case.sharded and ranks is not None:
        described = DenseModel(
            model=meta_model(config, torch.bfloat16), weights="meta", family=family, source=""
        )
        model = load_sharded(described, ranks, device, torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    dense = DenseModel(
        model=model.requires_grad_(False).eval(),
        weights="shards" if case.sharded else "memory",
        family=family,
        source="",
    )
    state = AlignState(
        affinity_LNE=torch.randn(layers, config.intermediate_size, split.columns),
        router_LED=torch.randn(layers, split.num_experts, config.hidden_size),
        step=0,
    )
    how = AlignConfig(
        batch_size=2 * case.micro_batch_size * case.ranks, micro_batch_size=case.micro_batch_size
    )
    blocks: Any = Tokens(case.seq_len)
    task = Alignment(dense, blocks, (state,), (split,), how, AssignmentConfig(), seed=0)
    for part in task.parts:  # a run keeps the start on the device only while it begins
        part.initial = None  # type: ignore[assignment]
    return task


def _finetuning(case: Case, config: Any, ranks: Any) -> Finetuning:
    split, layers = split_of(config), config.num_hidden_layers
    layout: Any = SimpleNamespace(
        moe_layers=range(layers),
        active_experts=split.active_experts,
        router_LED=torch.zeros(layers, split.num_experts, config.hidden_size),
        neurons_of_expert=lambda layer: torch.arange(config.intermediate_size).view(-1, 128),
        shared_neurons=lambda layer: torch.arange(0),
    )
    described = DenseModel(
        model=meta_model(config, torch.bfloat16),
        weights="meta",
        family=family_of(config),
        source="",
    )
    how = FinetuneConfig(
        train=case.train,  # type: ignore[arg-type]
        batch_size=2 * case.micro_batch_size * case.ranks,
        micro_batch_size=case.micro_batch_size,
    )
    blocks: Any = Tokens(case.seq_len)
    student = Student(described, layout, how, ranks, seed=0)
    return Finetuning(student, None, blocks, how, seed=0)


def compared(case: Case, layers: int | None) -> dict[str, Any]:
    """Simulated and planned peak of a model of so many layers, or of the whole one."""
    if layers:
        peak = simulated(case, layers)
    else:
        ten, eleven = (simulated(case, few) for few in (10, 11))
        peak = ten + (SHAPES[case.model][3] - 10) * (eleven - ten)
    planned = case.planned(layers)
    return {**asdict(case), "simulated": peak, "planned": planned, "ratio": planned / peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int)
    layers = parser.parse_args().layers
    trained = ["assignment", "everything"] + ["router"] * (layers is not None)
    ways = product(trained, [(1, False), (8, False), (8, True)])
    rows = []
    for model, (train, (ranks, sharded)), checkpointing in product(
        ["Qwen2.5-7B"] if layers else SHAPES, [*ways], (False, True)
    ):
        how: dict[str, Any] = {"train": train, "ranks": ranks, "sharded": sharded}
        rows.append(compared(Case(model=model, checkpointing=checkpointing, **how), layers))
        print(json.dumps(rows[-1]), flush=True)
    if not layers:
        keep("results/simulated_memory.json", {"origin": "simulated", "rows": rows}, 0)


if __name__ == "__main__":
    main()
