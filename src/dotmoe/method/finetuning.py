"""STAGE finetune: recovery training of the converted model, computing only the chosen experts."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.utils import get_total_norm

from dotmoe.common.device import resolved_device
from dotmoe.common.distributed import fsdp_mesh, is_rank_zero, num_ranks, raise_on_all_ranks
from dotmoe.common.seeds import generator_for
from dotmoe.common.sharded import full_tensor, local_part, own_rows
from dotmoe.method.config import FinetuneConfig
from dotmoe.method.layout import ExpertLayout, save_layouts
from dotmoe.method.losses import Taught
from dotmoe.method.objective import Objective, taught_by, taught_by_own_weights
from dotmoe.method.router import Routing
from dotmoe.method.sparse import make_sparse
from dotmoe.models.checkpoint import Tensors
from dotmoe.models.config import LoadConfig
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.hooks import recomputing
from dotmoe.models.load import MODEL, dtype_for, fill_own_rows, is_sharded, load_dense
from dotmoe.models.meta_model import compute_constants, meta_model, num_parameters
from dotmoe.models.save import write_weights
from dotmoe.text.blocks import TokenBlocks
from dotmoe.training.config import DEFAULT_TRAINING, TrainingConfig
from dotmoe.training.folder import OnStep
from dotmoe.training.loop import ParameterGroup, require_trainable, train


class Student(nn.Module):
    """A model whose split FFNs are experts, read from the dense model's files under FSDP2.

    A rank holds its rows of every tensor (experts are rows), or all rows if it is alone in its
    group; with `offload` on the host. Trained parameters are float32, cast to the model's dtype to
    compute: at the paper's learning rate most updates of a 16-bit weight would be rounded away.
    """

    def __init__(
        self,
        dense: DenseModel,
        layout: ExpertLayout,
        config: FinetuneConfig,
        ranks: DeviceMesh,
        *,
        seed: int,
    ) -> None:
        """Read this rank's part; raise a `UserError` for a tensor that is missing or does not fit.

        `dense` is on the meta device, in the dtype of computation, and becomes the student.
        """
        super().__init__()
        dense.require("meta")
        device = torch.device(ranks.device_type)
        dtype = next(dense.model.parameters()).dtype
        tensors = Tensors.of(dense)
        stored = {name for name, _ in dense.model.named_parameters()}
        tensors.require_model(dense.model)
        compute_constants(dense.model, device)
        self.routing = Routing(
            active_experts=layout.active_experts,
            surrogate=config.surrogate,
            in_model_dtype=config.router_dtype == "model",
            mean_if_unchosen=config.unchosen == "mean",
        )
        model: Any = dense.model
        is_divided = ranks.size() > 1 or dtype != torch.float32 or config.offload
        self.dense = replace(dense, weights="shards" if is_divided else "memory")
        self.model = model
        self.ffns = tuple(make_sparse(dense, layout, self.routing))
        self.tuner = self._choose_trained(config)
        if is_divided:
            # One rank that computes in float32 without offload has nothing to divide, cast or move.
            self._divide(ranks, dtype, offload=config.offload)
        self._allocate(device, offload=config.offload)
        model.tie_weights()
        with torch.no_grad():
            self._read(tensors, stored, layout)
            _start_adapters(model, seed)

    def _choose_trained(self, config: FinetuneConfig) -> Any:
        """Mark what is trained, and hold it in float32; gives the tuner of LoRA's adapters."""
        self.model.requires_grad_(config.train == "everything")
        for ffn in self.ffns:
            ffn.requires_grad_(config.train != "lora")
        tuner = _with_adapters(self.model, config) if config.train == "lora" else None
        if config.train == "everything":
            self.model.float()
        elif config.train == "experts":
            for ffn in self.ffns:
                ffn.float()
        for ffn in self.ffns:
            ffn.router.requires_grad_(config.lr_router != 0)
        return tuner

    def trained(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def forward(self, compute: Callable[[], Any]) -> Any:
        """Run `compute()` as one forward pass of FSDP."""
        return compute()

    def taught(self, tokens_BT: Tensor) -> Taught:
        """What the student teaches itself: with all experts on, no routers and no adapters."""
        if self.tuner is None:
            return taught_by_own_weights(self.dense, tokens_BT)
        self.tuner.disable_adapter_layers()
        try:
            return taught_by_own_weights(self.dense, tokens_BT)
        finally:
            self.tuner.enable_adapter_layers()

    def _divide(self, ranks: DeviceMesh, dtype: torch.dtype, *, offload: bool) -> None:
        """Shard all weights with FSDP2; a layer is whole, and on the GPU, only while it runs."""
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        how: dict[str, Any] = {"mesh": ranks}
        if offload:
            how["offload_policy"] = CPUOffloadPolicy(pin_memory=ranks.device_type != "cpu")
        for ffn in self.ffns:
            if not self.routing.in_model_dtype:
                fully_shard(ffn.router, **how)  # a group of its own, which stays float32
        for layer in (*self.dense.family.layers(self.model), self):
            fully_shard(layer, mp_policy=policy, **how)
        for module in self.modules():
            if isinstance(module, FSDPModule):  # ranks have parts of a batch: sum, not mean
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo supports nothing else

    def _allocate(self, device: torch.device, *, offload: bool) -> None:
        """Give storage to weights that have none; the others move to the device."""
        home = torch.device("cpu") if offload else device

        def allocated(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                return torch.empty_like(tensor, device=home)
            if offload:  # FSDP2 has put it in its place
                return tensor
            return tensor.to(device)

        # Like nn.Module.to_empty, which would empty buffers and routers, too.
        self._apply(allocated)  # type: ignore[no-untyped-call]

    def _read(self, tensors: Tensors, stored: set[str], layout: ExpertLayout) -> None:
        """Read this rank's rows, and FFN projections whole, since any neuron may be among them."""
        for name, parameter in self.model.named_parameters():
            name = name.replace(".base_layer", "")  # PEFT wraps modules with adapters
            if name in stored:
                fill_own_rows(parameter, tensors, name)
        for layer, ffn in zip(layout.moe_layers, self.ffns, strict=True):
            for projection, experts, shared in ffn.weights():
                weight = tensors.read(self.dense.family.ffn_tensor(layer, projection))
                rows_ND = weight.T if projection == "down" else weight
                for part, neurons in ((experts, ffn.neurons_ES), (shared, ffn.shared_M)):
                    if part is not None:
                        local_part(part).copy_(rows_ND[neurons[own_rows(part)].cpu()])


def _with_adapters(model: nn.Module, config: FinetuneConfig) -> Any:
    """PEFT's tuner around a model on the meta device, with adapters on experts and attention."""
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    # Each forward pass, PEFT adds the products of an expert's three adapters to its weights: that
    # takes memory for one more copy of the layer's experts. It has no dropout for stacked experts.
    of_experts = [name for name, _ in model.named_parameters() if name.endswith("_ESD")]
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=32,
        target_modules=r".*\.(self_attn\.(q|k|v|o|qkv)|mlp\.(gate|up|gate_up|down))_proj",
        target_parameters=of_experts,
    )
    tuner = LoraModel(model, lora, "default")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()  # PEFT gives them the dtype of the weights
    return tuner


def _start_adapters(model: nn.Module, seed: int) -> None:
    """Set first factors to uniform random numbers, as PEFT does, and second factors to zero."""
    generator = generator_for(seed, "adapters")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            local_part(parameter).zero_()
        elif "lora_A" in name:  # drawn whole: the same on any number of ranks
            whole = torch.empty(parameter.shape)
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
            local_part(parameter).copy_(whole[own_rows(parameter)])


class Finetuning(Objective):
    """Training of the sparse model on text and, with a `kl_weight`, to follow the dense model.

    Without a `teacher`, the student itself teaches, with all experts on and no routers or adapters.
    """

    config: FinetuneConfig

    def __init__(
        self,
        student: Student,
        teacher: DenseModel | None,
        blocks: TokenBlocks,
        config: FinetuneConfig,
        *,
        seed: int,
    ) -> None:
        taught = student.taught if teacher is None else partial(taught_by, teacher)
        super().__init__(student.dense, blocks, config, teacher=taught, seed=seed)
        self.model = student

    def parameter_groups(self) -> list[ParameterGroup]:
        """The routers, unless their rate is 0, and the other trained weights."""
        trained = self.model.trained().items()
        routers = [(name, p) for name, p in trained if ".router." in name]
        weights = [(name, p) for name, p in trained if ".router." not in name]
        rate = self.config.lr or self._rate()
        of_routers = self.config.lr_router
        groups = [
            {"params": routers, "lr": rate if of_routers is None else of_routers},
            {"params": weights, "lr": rate},
        ]
        return [group for group in groups if group["params"]]

    def _rate(self) -> float:
        """Peak learning rate if none is given; the size of weights differs tenfold by model."""
        if self.config.train == "lora":
            return 4e-4
        named = self.model.named_parameters()
        matrices = [each for name, each in named if each.dim() > 1 and ".router." not in name]
        size = sum(matrix.numel() for matrix in matrices)
        return 0.0005 * float(full_tensor(get_total_norm(matrices))) / math.sqrt(size)

    def losses(
        self, tokens_BT: Tensor, counted_P: Tensor | None = None, weight: float = 1.0
    ) -> dict[str, Tensor]:
        """See `Objective`; one student call, so that FSDP gathers embedding and head only once."""
        losses: dict[str, Tensor] = self.model(
            partial(super().losses, tokens_BT, counted_P, weight)
        )
        return losses

    def differentiate(self, loss: Tensor, *, is_last: bool) -> None:
        """See `Objective`; replicas sum their gradients only after the last micro-batch."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_all_reduce(is_last)
        super().differentiate(loss, is_last=is_last)


def computed_in(
    dense: DenseModel, config: FinetuneConfig, load: LoadConfig
) -> tuple[torch.dtype, bool]:
    """The dtype that a finetuning computes in, and whether its ranks shard the weights."""
    device = resolved_device(load.device)
    stored = Tensors.of(dense).dtype
    dtype = dtype_for(dense, load, device)
    # Weight, gradient and two moments in float32 are 16 bytes per trained parameter.
    bytes_each = 16 if config.train != "lora" else stored.itemsize
    num_bytes = bytes_each * num_parameters(dense.model)
    shard = num_ranks() > 1 and is_sharded(load.sharding, num_bytes, device)
    return dtype, shard


def finetune(
    dense: DenseModel,
    layout: ExpertLayout,
    blocks: TokenBlocks,
    config: FinetuneConfig,
    *,
    folder: Path,
    seed: int,
    load: LoadConfig,
    origin: DenseModel | None = None,
    training: TrainingConfig = DEFAULT_TRAINING,
    on_step: OnStep = lambda step, metrics: None,
) -> ExpertLayout:
    """Train the MoE that the layout makes of a dense model; all ranks call this together.

    Since the experts partition the neurons, the result is a layout and a dense checkpoint with new
    weights, in the original order of the neurons and in the dtype of its source: `folder` receives
    `model/`, `layout.safetensors`, and what `train` writes. Weights are read from the files of
    `dense`, which may be on the meta device; if that is a repaired model, `origin` is the dense one
    to learn from. `load` sets the dtype to compute in, and whether ranks shard weights.

    Returns the same experts with trained routers. Raises a `UserError` as `train` does, or if the
    dtype of computation is float16.
    """
    device = resolved_device(load.device)
    dtype, shard = computed_in(dense, config, load)
    shard = shard or config.offload  # else gradients would add up in a GPU's memory, whole
    raise_on_all_ranks(lambda: require_trainable(dtype))
    teacher = None
    if config.kl_weight > 0 and (config.train != "lora" or origin is not None):
        how = replace(load, sharding="shard" if shard else "replicate")
        teacher = load_dense((origin or dense).source, how)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    with fsdp_mesh(device, shard=shard) as ranks:
        described = replace(dense, model=meta_model(dense.config, dtype), weights="meta")
        student = raise_on_all_ranks(lambda: Student(described, layout, config, ranks, seed=seed))
        task = Finetuning(student, teacher, blocks, config, seed=seed)
        with recomputing(student.dense, config.activation_checkpointing):
            train(task, folder, training, on_step)
        trained = write_student(student, layout, folder / MODEL)
    if is_rank_zero():
        save_layouts((trained,), folder)
    return trained


@torch.no_grad()
def write_student(student: Student, layout: ExpertLayout, out: Path) -> ExpertLayout:
    """Write a dense checkpoint in the original order of neurons; all ranks call this together.

    Returns the student's experts with the trained routers, centred as in extraction.
    """
    if student.tuner is not None:
        student.tuner.merge_and_unload()
    write_weights(student.dense, out)
    router_LED = layout.router_LED.clone()
    for layer, ffn in zip(layout.moe_layers, student.ffns, strict=True):
        rows_ED = full_tensor(ffn.router.weight_ED).float().cpu()
        router_LED[layer] = rows_ED - rows_ED.mean(dim=0, keepdim=True)
    return replace(layout, router_LED=router_LED)
