"""A student divided over the ranks, whose weights are read from the dense files into the shards."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dotmoe.artifacts import DenseModel
from dotmoe.distributed import own_rows
from dotmoe.finetune.config import FinetuneConfig
from dotmoe.finetune.lora import ADAPTED
from dotmoe.finetune.student import Student
from dotmoe.layout import ExpertLayout
from dotmoe.moe.sparse_ffn import SparseFFN
from dotmoe.parameters import compute_constants
from dotmoe.sharded_weights import source_of, stored_tensor
from dotmoe.training.task import local_part

Sources = Mapping[str, tuple[Path, str]]
"""File and stored name of each tensor of the dense model."""


@torch.no_grad()
def sharded_student(
    dense: DenseModel, layout: ExpertLayout, config: FinetuneConfig, mesh: DeviceMesh, *, seed: int
) -> Student:
    """A student of which this rank holds its rows of every tensor; experts are rows.

    Host memory holds, besides the shards, what one tensor's file maps while it is read: an FFN
    projection is read whole, since any of its neurons may be this rank's; of others, the own rows.
    What is trained is float32 as stored, never rounded to the dtype to compute in.

    Args:
        dense: A dense model on the meta device, in the dtype to compute in; its files are read by
            every rank. It becomes the student.
        layout: Experts and routers.
        config: What is trained.
        mesh: The ranks.
        seed: Of adapters.

    Raises:
        UserError: A tensor is missing, has another shape, or cannot be read.
    """
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    sources = source_of(dense.model, dense.folder)
    compute_constants(dense.model, device)
    student = Student(dense, layout, config, seed=seed)
    student.shard(mesh)
    _allocate(student, device)
    for name, parameter in student.model.named_parameters():
        if name.replace(ADAPTED, "") in sources:
            _fill(parameter, *sources[name.replace(ADAPTED, "")])
    for layer, ffn in zip(layout.moe_layers, student.ffns, strict=True):
        _fill_experts(ffn, layer, dense, sources)
    if student.adapters is not None:
        student.adapters.start(seed)
    return student


def _allocate(student: Student, device: torch.device) -> None:
    """Make room for this rank's rows of what is on the meta device."""

    def allocated(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    # As nn.Module.to_empty does, which would empty buffers and routers too.
    student._apply(allocated)  # type: ignore[no-untyped-call]


def _fill(parameter: Tensor, file: Path, name: str) -> None:
    with stored_tensor(file, name) as tensor:
        local_part(parameter).copy_(tensor[own_rows(parameter)])


def _fill_experts(ffn: SparseFFN, layer: int, dense: DenseModel, sources: Sources) -> None:
    """Read this rank's experts of a layer, and its rows of the shared one."""
    weights = {
        "gate": (ffn.gate_ESD, ffn.shared_gate_MD),
        "up": (ffn.up_ESD, ffn.shared_up_MD),
        "down": (ffn.down_ESD, ffn.shared_down_MD),
    }
    for projection, (experts_ESD, shared_MD) in weights.items():
        part = dense.family.stored(dense.config, dense.family.ffn_tensor(layer, projection))
        with stored_tensor(*sources[part.stored]) as tensor:
            stored = tensor[slice(*part.rows) if part.rows else slice(None)]
            rows_ND = stored.T if projection == "down" else stored
            _fill_rows(experts_ESD, ffn.neurons_ES, rows_ND)
            if shared_MD is not None:
                _fill_rows(shared_MD, ffn.shared_M, rows_ND)


def _fill_rows(parameter: Tensor, neurons: Tensor, rows_ND: Tensor) -> None:
    local_part(parameter).copy_(rows_ND[neurons[own_rows(parameter)].cpu()])
