"""The model that is trained: the dense one with experts of its own, from files to files."""

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dotmoe.checkpoint import Tensors
from dotmoe.distributed import full_tensor, is_rank_zero, local_part, own_rows
from dotmoe.files import write_json
from dotmoe.layout import ExpertLayout
from dotmoe.load import fill_own_rows
from dotmoe.models.dense import DenseModel
from dotmoe.moe.router import Routing
from dotmoe.moe.sparse import EXPERT_WEIGHTS, SparseFFN, make_sparse
from dotmoe.parameters import compute_constants

if TYPE_CHECKING:
    from dotmoe.finetuning import FinetuneConfig

MODEL, LAYOUT = "model", "layout.safetensors"
"""What is written into the stage's folder."""

_ATTENTION = r".*\.self_attn\.(q|k|v|o|qkv)_proj"
_DENSE_FFN = r".*\.mlp\.(gate|up|gate_up|down)_proj"


class Student(nn.Module):
    """A model whose split FFNs are experts, read from the dense model's files under FSDP2.

    A rank holds its rows of every tensor (experts are rows), or all of them where it is a group of
    one. What is trained is float32 as stored, and computed with in the dtype of the model: at the
    paper's rate most updates of a 16-bit weight would be rounded away. Host memory holds, besides,
    what one tensor's file maps while it is read.
    """

    def __init__(
        self,
        dense: DenseModel,
        layout: ExpertLayout,
        config: "FinetuneConfig",
        ranks: DeviceMesh,
        *,
        seed: int,
    ) -> None:
        """Read this rank's part; a `UserError` names a tensor that is missing or does not fit.

        `dense` is on the meta device, in the dtype to compute in, and becomes the student; `ranks`
        are a `fsdp_mesh`; the seed is that of adapters.
        """
        super().__init__()
        device = torch.device(ranks.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        dtype = next(dense.model.parameters()).dtype
        tensors = Tensors.of(dense)
        tensors.require_shapes(dense.model)
        stored = {name for name, _ in dense.model.named_parameters()}
        compute_constants(dense.model, device)
        self.routing = Routing(
            active_experts=layout.active_experts,
            surrogate=config.surrogate,
            surrogate_temperature=config.surrogate_temperature,
        )
        self.dense = dense
        self.model: Any = dense.model
        self.ffns = tuple(make_sparse(dense, layout, self.routing))
        self.tuner: Any = None
        self.model.requires_grad_(config.train == "everything")
        if config.train == "lora":
            self.tuner = _with_adapters(self.model, config.lora_rank, config.lora_alpha)
        if config.train == "everything":
            self.model.float()
        for ffn in self.ffns:
            ffn.router.requires_grad_(True)
        if ranks.size() > 1 or dtype != torch.float32:  # else there is nothing to divide or to cast
            self._divide(ranks, dtype)
        self._allocate(device)
        with torch.no_grad():
            self._read(tensors, stored, layout)
            _start_adapters(self.model, seed)

    def trained(self) -> dict[str, nn.Parameter]:
        """Parameters that are trained, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def forward(self, compute: Callable[[], Any]) -> Any:
        """`compute()` as one forward pass of FSDP."""
        return compute()

    def set_requires_all_reduce(self, wanted: bool) -> None:
        """Whether the next backward pass adds up the gradients of replicas."""
        if isinstance(self, FSDPModule):
            FSDPModule.set_requires_all_reduce(self, wanted)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside, the model computes without adapters, if it has any."""
        if self.tuner is not None:
            self.tuner.disable_adapter_layers()
        try:
            yield
        finally:
            if self.tuner is not None:
                self.tuner.enable_adapter_layers()

    def _divide(self, ranks: DeviceMesh, dtype: torch.dtype) -> None:
        """Divide all weights by FSDP2; a layer is whole only while it runs.

        Routers have a group of their own, which stays float32. Gradients of the ranks are added up,
        not averaged: each has its part of a batch.
        """
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for ffn in self.ffns:
            fully_shard(ffn.router, mesh=ranks)
        for layer in (*self.dense.family.layers(self.model), self):
            fully_shard(layer, mesh=ranks, mp_policy=policy)
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has nothing else

    def _allocate(self, device: torch.device) -> None:
        """Make room for this rank's rows of what is on the meta device."""
        head, embedding = self.dense.family.head(self.model), self.model.get_input_embeddings()
        is_tied = head.weight is embedding.weight
        # As nn.Module.to_empty does, which would empty buffers and routers, too.
        self._apply(  # type: ignore[no-untyped-call]
            lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
        )
        if is_tied:
            head.weight = embedding.weight

    def _read(self, tensors: Tensors, stored: set[str], layout: ExpertLayout) -> None:
        """Read this rank's rows; of an FFN projection, any neuron of which may be one, all."""
        for name, parameter in self.model.named_parameters():
            name = name.replace(".base_layer", "")  # PEFT's, around a module with an adapter
            if name in stored:
                fill_own_rows(parameter, tensors, name)
        for layer, ffn in zip(layout.moe_layers, self.ffns, strict=True):
            for projection, experts, shared in ffn.weights():
                weight = tensors.read(self.dense.family.ffn_tensor(layer, projection))
                rows_ND = weight.T if projection == "down" else weight
                for part, neurons in ((experts, ffn.neurons_ES), (shared, ffn.shared_M)):
                    if part is not None:
                        local_part(part).copy_(rows_ND[neurons[own_rows(part)].cpu()])


def _with_adapters(model: nn.Module, rank: int, alpha: int) -> Any:
    """PEFT's tuner around a model on the meta device, with adapters on experts and attention.

    An expert has one for each of its three projections; PEFT adds their products to the experts'
    weights once a forward pass, which costs 6 r N D multiplications and additions a layer whatever
    the number of tokens, and memory for one more copy of the layer's experts. There is no dropout:
    adapters of stacked experts can have none, and a step must be the same when repeated.
    """
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    names = [name for name, _ in model.named_parameters()]
    lora = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=f"{_ATTENTION}|{_DENSE_FFN}",
        target_parameters=[name for name in names if name.rpartition(".")[2] in EXPERT_WEIGHTS],
    )
    tuner = LoraModel(model, lora, "default")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()  # PEFT gives them the dtype of the weights
    return tuner


def _start_adapters(model: nn.Module, seed: int) -> None:
    """Set first factors to uniform random numbers as PEFT does, second ones to zero.

    They are drawn whole, so they are the same on any number of ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            local_part(parameter).zero_()
        elif "lora_A" in name:
            values = nn.init.kaiming_uniform_(
                torch.empty(parameter.shape), a=math.sqrt(5), generator=generator
            )
            local_part(parameter).copy_(values[own_rows(parameter)])


@torch.no_grad()
def write_student(student: Student, layout: ExpertLayout, out: Path) -> ExpertLayout:
    """Write a dense checkpoint in the original order of neurons; all ranks together.

    Adapters are merged first; `layout` is what the student was made with.

    Returns:
        The same experts with the trained routers, centred as extraction does.
    """
    if student.tuner is not None:
        student.tuner.merge_and_unload()
    write_weights(student.dense, out)
    router_LED = layout.router_LED.clone()
    for layer, ffn in zip(layout.moe_layers, student.ffns, strict=True):
        rows_ED = full_tensor(ffn.router.weight_ED).float().cpu()
        router_LED[layer] = rows_ED - rows_ED.mean(dim=0, keepdim=True)
    return replace(layout, router_LED=router_LED)


def write_weights(dense: DenseModel, out: Path) -> None:
    """Write the dense checkpoint of what a model is in memory; all ranks together.

    Tensors that are divided over the ranks are put together one at a time; rank 0 holds those of
    one layer in main memory, and writes a file for each. What is in `out` is replaced.
    """
    if is_rank_zero():
        begin_checkpoint(dense, out)
    num_files = len(dense.family.layers(dense.model)) + 1
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(_parts(dense), 1):
        if is_rank_zero():
            file = f"model-{number:05d}-of-{num_files:05d}.safetensors"
            save_file(tensors, out / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
    if is_rank_zero():
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(out / "model.safetensors.index.json", index)


def begin_checkpoint(dense: DenseModel, out: Path) -> None:
    """Make a folder, in place of what is there, with all of a dense checkpoint but its weights."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for name in ("config.json", "generation_config.json"):
        if (dense.folder / name).is_file():
            shutil.copyfile(dense.folder / name, out / name)
    dense.tokenizer.save_pretrained(out)


def _parts(dense: DenseModel) -> Iterator[dict[str, Tensor]]:
    """Stored names and tensors of each layer, then of all that is in none; on rank 0, else {}."""
    # Not the config's dtype: Transformers sets that to the one in which it loaded the model.
    dtype = Tensors.of(dense).dtype
    rest: dict[str, Tensor] = dict(dense.model.named_parameters())

    def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors.items():
            full = full_tensor(tensor)
            if is_rank_zero():
                found[name] = full.to(dtype).cpu().contiguous()
        return found

    for index, layer in enumerate(dense.family.layers(dense.model)):
        prefix, ffn = f"model.layers.{index}.", layer.get_submodule("mlp")
        own = {name: rest.pop(name) for name in list(rest) if name.startswith(prefix)}
        if isinstance(ffn, SparseFFN):
            own = {name: p for name, p in own.items() if not name.startswith(f"{prefix}mlp.")}
            yield whole(own | _ffn_tensors(dense, ffn, index))
        else:
            yield whole(own)
    yield whole(rest)


def _ffn_tensors(dense: DenseModel, ffn: SparseFFN, layer: int) -> dict[str, Tensor]:
    """The projections as the checkpoint of the family stores them, some of them fused."""
    fused: dict[str, list[tuple[int, Tensor]]] = {}
    for projection, rows_ND in ffn.dense_rows().items():
        part = dense.family.stored(dense.config, dense.family.ffn_tensor(layer, projection))
        weight = rows_ND.T if projection == "down" else rows_ND
        fused.setdefault(part.stored, []).append((part.rows[0] if part.rows else 0, weight))
    return {
        name: torch.cat([weight for _, weight in sorted(parts, key=lambda part: part[0])])
        for name, parts in fused.items()
    }
