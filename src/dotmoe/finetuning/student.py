"""The model that is trained: the dense one with experts of its own, from files to files."""

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

from dotmoe.checkpoint.tensors import Tensors
from dotmoe.distributed import full_tensor, is_rank_zero, local_part, own_rows
from dotmoe.files import write_json
from dotmoe.finetuning.lora import ADAPTED, add_adapters, start_adapters
from dotmoe.layout import ExpertLayout
from dotmoe.models.dense import DenseModel
from dotmoe.moe.router import Routing
from dotmoe.moe.sparse import SparseFFN, make_sparse
from dotmoe.parameters import compute_constants
from dotmoe.sharded_weights import checkpoint_dtype, fill_own_rows, require_shapes

if TYPE_CHECKING:
    from dotmoe.finetuning import FinetuneConfig


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
        """Read this rank's part.

        Args:
            dense: On the meta device, in the dtype to compute in. It becomes the student.
            layout: Experts and routers.
            config: What is trained.
            ranks: See `fsdp_mesh`.
            seed: Of adapters.

        Raises:
            UserError: A tensor is missing, has another shape, or cannot be read.
        """
        super().__init__()
        device = torch.device(ranks.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        dtype = next(dense.model.parameters()).dtype
        tensors = Tensors.of(dense)
        require_shapes(dense.model, tensors)
        stored = {name for name, _ in dense.model.named_parameters()}
        compute_constants(dense.model, device)
        self.routing = Routing(
            active_experts=layout.active_experts,
            surrogate=config.surrogate,
            surrogate_temperature=config.surrogate_temperature,
        )
        self._dense = (dense,)  # in a tuple: its model is registered below
        self.model: Any = dense.model
        self.ffns = tuple(make_sparse(dense, layout, self.routing))
        self.tuner: Any = None
        self.model.requires_grad_(False)
        if config.train == "lora":
            self.tuner = add_adapters(self.model, rank=config.lora_rank, alpha=config.lora_alpha)
        if config.train == "everything":
            self.model.requires_grad_(True).float()
        for ffn in self.ffns:
            ffn.router.requires_grad_(True)
        if ranks.size() > 1 or dtype != torch.float32:  # else there is nothing to divide or to cast
            self._divide(ranks, dtype)
        self._allocate(device)
        with torch.no_grad():
            self._read(tensors, stored, layout)
        if self.tuner is not None:
            start_adapters(self.model, seed)

    @property
    def dense(self) -> DenseModel:
        """What the student was made of; its `model` is the student's."""
        return self._dense[0]

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
        if self.tuner is None:
            yield
            return
        self.tuner.disable_adapter_layers()
        try:
            yield
        finally:
            self.tuner.enable_adapter_layers()

    def _divide(self, ranks: DeviceMesh, dtype: torch.dtype) -> None:
        """Divide all weights by FSDP2; a layer is whole only while it runs.

        Routers have a group of their own, which stays float32. Gradients of the ranks are added up,
        not averaged: each has its part of a batch.
        """
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for ffn in self.ffns:
            fully_shard(ffn.router, mesh=ranks)
        for layer in self.dense.family.layers(self.model):
            fully_shard(layer, mesh=ranks, mp_policy=policy)
        fully_shard(self, mesh=ranks, mp_policy=policy)
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
            name = name.replace(ADAPTED, "")
            if name in stored:
                fill_own_rows(parameter, tensors, name)
        for layer, ffn in zip(layout.moe_layers, self.ffns, strict=True):
            for projection, experts, shared in ffn.weights():
                weight = tensors.read(self.dense.family.ffn_tensor(layer, projection))
                rows_ND = weight.T if projection == "down" else weight
                _fill(experts, ffn.neurons_ES, rows_ND)
                if shared is not None:
                    _fill(shared, ffn.shared_M, rows_ND)


def _fill(parameter: Tensor, neurons: Tensor, rows_ND: Tensor) -> None:
    local_part(parameter).copy_(rows_ND[neurons[own_rows(parameter)].cpu()])


@torch.no_grad()
def write_student(student: Student, layout: ExpertLayout, out: Path) -> ExpertLayout:
    """Write a dense checkpoint in the original order of neurons; all ranks together.

    Adapters are merged first. Tensors that are divided over the ranks are put together one at a
    time; rank 0 holds those of one layer in main memory, and writes a file for each.

    Args:
        student: The trained model.
        layout: What it was made with.
        out: Folder to write; what is there is replaced.

    Returns:
        The same experts with the trained routers, centred as extraction does.
    """
    if student.tuner is not None:
        student.tuner.merge_and_unload()
    if is_rank_zero():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        for name in ("config.json", "generation_config.json"):
            if (student.dense.folder / name).is_file():
                shutil.copyfile(student.dense.folder / name, out / name)
        student.dense.tokenizer.save_pretrained(out)
    num_files = len(student.dense.family.layers(student.dense.model)) + 1
    sizes: dict[str, dict[str, int]] = {}
    for part in range(num_files):
        file = f"model-{part + 1:05d}-of-{num_files:05d}.safetensors"
        sizes[file] = _write_part(student, part, out / file)
    if is_rank_zero():
        total = sum(sum(names.values()) for names in sizes.values())
        weight_map = {name: file for file, names in sizes.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(out / "model.safetensors.index.json", index)
    router_LED = layout.router_LED.clone()
    for layer, ffn in zip(layout.moe_layers, student.ffns, strict=True):
        rows_ED = full_tensor(ffn.router.weight_ED).float().cpu()
        router_LED[layer] = rows_ED - rows_ED.mean(dim=0, keepdim=True)
    return replace(layout, router_LED=router_LED)


def _write_part(student: Student, part: int, file: Path) -> dict[str, int]:
    """Write one file on rank 0; names and bytes of its tensors."""
    # Not the config's dtype: Transformers sets that to the one in which it loaded the model.
    dtype = checkpoint_dtype(None, student.dense.folder)
    tensors = {}
    for name, tensor in _tensors(student, part):
        full = full_tensor(tensor)
        if is_rank_zero():
            tensors[name] = full.to(dtype).cpu().contiguous()
    if is_rank_zero():
        save_file(tensors, file, metadata={"format": "pt"})
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def _tensors(student: Student, part: int) -> Iterator[tuple[str, Tensor]]:
    """Stored names and tensors of a layer; after the last one, of all that is in no layer."""
    dense = student.dense
    layers = list(dense.family.layers(dense.model))
    if part == len(layers):
        inside = {id(p) for layer in layers for p in layer.parameters()}
        for name, parameter in dense.model.named_parameters():
            if id(parameter) not in inside:
                yield name, parameter
        return
    ffn = layers[part].get_submodule("mlp")
    for name, parameter in layers[part].named_parameters():
        if not (isinstance(ffn, SparseFFN) and name.startswith("mlp.")):
            yield f"model.layers.{part}.{name}", parameter
    if isinstance(ffn, SparseFFN):
        yield from _ffn_tensors(dense, ffn, part)


def _ffn_tensors(dense: DenseModel, ffn: SparseFFN, layer: int) -> Iterator[tuple[str, Tensor]]:
    """The projections as the checkpoint of the family stores them, some of them fused."""
    fused: dict[str, list[tuple[int, Tensor]]] = {}
    for projection, rows_ND in ffn.dense_rows().items():
        part = dense.family.stored(dense.config, dense.family.ffn_tensor(layer, projection))
        weight = rows_ND.T if projection == "down" else rows_ND
        fused.setdefault(part.stored, []).append((part.rows[0] if part.rows else 0, weight))
    for name, parts in fused.items():
        yield name, torch.cat([weight for _, weight in sorted(parts, key=lambda part: part[0])])
