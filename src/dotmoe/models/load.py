"""Loading: a folder, GGUF file or hub name -> `DenseModel`, frozen, with every weight checked.

| function           | from                       | gives                                        |
|--------------------|----------------------------|----------------------------------------------|
| `describe_dense`   | a name                     | `DenseModel`, shapes alone                   |
| `describe_trained` | a described model, a stage | the same, its weights those of the stage     |
| `load_dense`       | a name                     | `DenseModel`, weights in memory or in shards |
| `load_described`   | a described model          | the same                                     |
| `load_whole`       | a described model          | `DenseModel`, all weights on this rank       |
| `left_on_disk`     | a described model          | `DenseModel`, each part read when it runs    |
| `read_weights`     | a described model          | its module with weights, not checked for NaN |
| `load_weights`     | a folder, of an export too | a stock module with weights, on the CPU      |

Under torchrun FSDP2 may shard the weights: each rank holds its rows of every tensor. A decoder
layer, or the embedding, is gathered only while it runs; the head only by a call of `full_tensor`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from dotmoe.common.device import memory_of, resolved_device
from dotmoe.common.distributed import mesh, num_ranks, raise_on_all_ranks
from dotmoe.common.errors import UserError, one_line
from dotmoe.common.files import is_finite
from dotmoe.common.sharded import local_part, own_rows
from dotmoe.common.tables import in_bytes
from dotmoe.models.checkpoint import (
    TEXT_OF_WRAPPER,
    Tensors,
    missing,
    require_checkpoint,
    stored_config,
    unknown_tensors,
)
from dotmoe.models.config import LoadConfig, Sharding
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.experts_on_cpu import use_all_at_once
from dotmoe.models.family import FAMILIES, family_of
from dotmoe.models.meta_model import compute_constants, meta_model, num_parameters
from dotmoe.models.on_disk import held_in_memory, on_disk
from dotmoe.models.read_config import config_of, dense_config
from dotmoe.models.scoring import makes_usual_logits
from dotmoe.models.source import at_revision, checkpoint_folder, is_local
from dotmoe.models.stock import read_stock
from dotmoe.models.tokenizer import load_tokenizer

MODEL, CHANGES = "model", "layers.parts"
"""What a stage that trains leaves in its folder: a dense checkpoint; or, after a repair, a folder
for each layer and target, with the changed weights and their metrics."""
LARGEST_WHOLE = 0.8
"""Share of a GPU's free memory for the weights of a model that writes; its cache needs the rest."""
LARGEST_SHARE = 0.5
"""Share of a GPU's memory for replicated weights; activations and training need the rest."""


def load_dense(source: str, config: LoadConfig) -> DenseModel:
    """Load a dense checkpoint, frozen, with finite parameters only; every rank must call this.

    `source` is a local folder, GGUF file, hub name, or `embedded` (the model in the package; name a
    folder of that name as `./embedded`).

    Raises:
        UserError: Nothing usable has that name, the family cannot be converted (checked before any
            weight is read or downloaded), files are missing or damaged, tensors are missing, not
            finite or of another shape, or the tokenizer does not fit. On all ranks if on one.
    """
    return load_described(raise_on_all_ranks(lambda: describe_dense(source)), config)


def load_described(dense: DenseModel, config: LoadConfig) -> DenseModel:
    """`load_dense` of a model that is described already; every rank must call this."""
    device = resolved_device(config.device)
    if device.index is not None and num_ranks() > 1:
        raise UserError(
            f"device is {config.device!r}, but under torchrun each rank takes a GPU of its own. "
            "Choose cuda or auto."
        )
    dtype = dtype_for(dense, config, device)
    ranks = mesh(device)

    def read() -> DenseModel:
        num_bytes = dtype.itemsize * num_parameters(dense.model)
        sharded = ranks is not None and is_sharded(config.sharding, num_bytes, device)
        model = _finite_weights(dense, device, dtype, ranks if sharded else None)
        return replace(dense, model=model, weights="shards" if sharded else "memory")

    return raise_on_all_ranks(read)


def load_whole(dense: DenseModel, config: LoadConfig) -> DenseModel:
    """The same model with all its weights on this rank's device; the other ranks take no part.

    Raises `UserError` if they take more than `LARGEST_WHOLE` of a GPU's free memory.
    """
    device = resolved_device(config.device)
    dtype = dtype_for(dense, config, device)
    if device.type == "cuda":
        num_bytes = dtype.itemsize * num_parameters(dense.model)
        free, _ = torch.cuda.mem_get_info(device)
        if num_bytes > LARGEST_WHOLE * free:
            raise UserError(
                f"the model writes on one device, but its weights take {in_bytes(num_bytes)} of "
                f"{in_bytes(free)} that are free there. Write its answers in a run on a larger "
                "device, or on the CPU, and name them: --data RUN/0_answers/fitted.jsonl."
            )
    return replace(dense, model=_finite_weights(dense, device, dtype), weights="memory")


def _finite_weights(
    dense: DenseModel, device: torch.device, dtype: torch.dtype, ranks: DeviceMesh | None = None
) -> nn.Module:
    """As `read_weights`; raises `UserError` for NaN and infinity too."""
    model = read_weights(dense, device, dtype, ranks)
    for name, parameter in model.named_parameters():
        if not is_finite(local_part(parameter)):
            raise UserError(
                f"{name} in {dense.folder} contains NaN or infinity (as {parameter.dtype}). "
                "Repair it, or load it with --dtype float32."
            )
    return model


def describe_trained(dense: DenseModel, stage: Path) -> DenseModel:
    """Description of a dense model with the weights that a repair or finetuning left in a folder.

    A repair leaves only what it has changed: the rest is read from the original checkpoint.
    """
    if (stage / MODEL).is_dir():
        return describe_dense(str(stage / MODEL))
    model = meta_model(dense.config)
    changed = replace(dense, model=model, weights="meta", changes=stage / CHANGES)
    return replace(changed, source=str(stage), revision=None)


def left_on_disk(dense: DenseModel, config: LoadConfig) -> DenseModel:
    """Make a model runnable while its weights stay in its folder; see `on_disk`."""
    device = resolved_device(config.device)
    return on_disk(dense, device, dtype_for(dense, config, device))


def dtype_for(dense: DenseModel, config: LoadConfig, device: torch.device) -> torch.dtype:
    """The dtype in which a model is converted; not float16 unless it is asked for.

    Gradients underflow in float16. bfloat16 has the range of float32.
    """
    dtype = resolved_dtype(config.dtype, device)
    if dtype != "auto":
        return dtype
    stored = Tensors.of(dense).dtype
    return torch.bfloat16 if stored == torch.float16 else stored


def describe_dense(source: str) -> DenseModel:
    """Describe a dense checkpoint, without weights (meta device); raises as `load_dense` does."""
    dense = _described(source)
    dense = replace(dense, tokenizer=load_tokenizer(dense.folder, dense.config.vocab_size))
    Tensors.of(dense).require_model(dense.model)
    return dense


def _described(source: str) -> DenseModel:
    """Describe a dense checkpoint whose tensors are not checked yet, without its tokenizer."""
    config, folder = dense_config(source)
    revision = None if is_local(source) else folder.name
    # What is read later is of the same commit, whatever the hub's branch is by then.
    source = at_revision(source, revision)
    folder = checkpoint_folder(source)
    return DenseModel(
        model=meta_model(config),
        weights="meta",
        family=family_of(config),
        folder=folder,
        source=source,
        revision=revision,
    )


def load_weights(folder: Path, dtype: torch.dtype | Literal["auto"]) -> nn.Module:
    """The weights of a checkpoint in its stock class: on the CPU, frozen, none missing or left out.

    A dense model is read as a conversion reads it; exports and others by Transformers. Raises
    `UserError` as `load_dense` does, but for weights that are not finite.
    """
    if dense := _dense_in(folder):
        stored = dense.config.dtype or Tensors.of(dense).dtype
        model = read_weights(dense, torch.device("cpu"), stored if dtype == "auto" else dtype)
    else:
        model = _by_transformers(folder, dtype).eval()
        if not makes_usual_logits(model):
            raise UserError(
                f"{folder} is a {config_of(folder).model_type}, and dotmoe does not know how its "
                "logits follow from its last hidden states: what it measured would be wrong. "
                "Choose a model of another architecture."
            )
        _take_generation_config(model, folder)
        use_all_at_once(model)
    return model.requires_grad_(False).eval()


def _take_generation_config(model: nn.Module, folder: Path) -> None:
    """Give a model the generation settings of its checkpoint: they name tokens that end a turn."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return
    try:
        settings: Any = read_stock(GenerationConfig, folder)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{file} cannot be read ({one_line(error)}). Mend it, or remove it."
        ) from error
    ends = settings.eos_token_id
    ids = ends if isinstance(ends, list) else [ends]
    if ends is not None and not all(isinstance(each, int) for each in ids):
        raise UserError(f"eos_token_id in {file} is {ends!r}, but it must be one or more ids.")
    cast(Any, model).generation_config = settings


def require_loadable(folder: Path) -> None:
    """Refuse what `load_weights` would refuse of a dense model; few of its weights are read."""
    require_checkpoint(folder)
    if dense := _dense_in(folder):
        Tensors.of(dense).require_model(dense.model)


def _dense_in(folder: Path) -> DenseModel | None:
    """The dense model in a folder, its tensors unchecked; None for one that cannot be split."""
    config = config_of(folder)
    family = FAMILIES.get(config.model_type)
    is_plain = not stored_config(folder).get("quantization_config")
    can_be_split = family is not None and family.unsupported(config) is None
    return _described(str(folder)) if is_plain and can_be_split else None


def _by_transformers(folder: Path, dtype: torch.dtype | Literal["auto"]) -> nn.Module:
    """A checkpoint that is no dense model of a known family, as Transformers loads it."""
    tensors = Tensors(folder, tied=False)  # also refuses a damaged file
    model, loaded = read_stock(
        AutoModelForCausalLM,
        folder,
        config=config_of(folder),
        dtype=dtype,
        use_safetensors=True,
        output_loading_info=True,
        key_mapping=TEXT_OF_WRAPPER,
        # Reported below; Transformers' own error does not say which tensor it is.
        ignore_mismatched_sizes=True,
    )
    if lacking := sorted(loaded["missing_keys"]):
        raise UserError(
            f"{missing(lacking[0], folder)} ({len(lacking)} such tensors), so it would be random. "
            "Download the checkpoint again or fix its config.json."
        )
    if others := sorted(name for name, *_ in loaded["mismatched_keys"]):
        raise UserError(
            f"{others[0]} in {folder} has another shape than its config.json requires "
            f"({len(others)} such tensors), so it would be random. Download the checkpoint again "
            "or fix its config.json."
        )
    others = sorted(name for name in loaded["unexpected_keys"] if name not in tensors.left_out)
    if others:
        raise UserError(unknown_tensors(others, folder))
    return cast(nn.Module, model)


def resolved_dtype(name: str, device: torch.device) -> torch.dtype | Literal["auto"]:
    """The dtype that `LoadConfig.dtype` means on a device; `auto` is the checkpoint's own."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def is_sharded(sharding: Sharding, num_bytes: int, device: torch.device) -> bool:
    """Whether weights of `num_bytes` are sharded when there are several ranks."""
    if sharding != "auto" or device.type != "cuda":
        return sharding == "shard"
    return num_bytes > LARGEST_SHARE * memory_of(device)


def read_weights(
    dense: DenseModel, device: torch.device, dtype: torch.dtype, mesh: DeviceMesh | None = None
) -> nn.Module:
    """A described model with its weights, read tensor by tensor; in shards if there is a mesh.

    In shards each rank reads its own rows. Raises `UserError` for a tensor that is missing or of
    another shape.
    """
    model = meta_model(dense.config, dtype)
    tensors = Tensors.of(dense)
    tensors.require_model(model)
    trunk = model.get_submodule("model")
    head = model.get_submodule("lm_head")
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    matrix: Tensor = model.get_parameter("lm_head.weight")
    is_tied = matrix is embedding.weight
    if mesh is not None:
        for part in (*dense.family.layers(model), embedding, trunk):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        matrix = distribute_tensor(matrix, mesh, [Shard(0)])  # on the meta device: nothing is sent
    trunk.to_empty(device=device)
    compute_constants(model, device)
    own = nn.Parameter(torch.empty_like(matrix, device=device), requires_grad=False)
    head.weight = embedding.weight if is_tied else own
    for name, parameter in model.named_parameters():
        fill_own_rows(parameter, tensors, name)
    _take_generation_config(model, dense.folder)
    return model


@contextmanager
def whole_weights(dense: DenseModel, index: int) -> Iterator[None]:
    """Within this context, all weights of a decoder layer are in memory, also after it has run.

    A layer in shards is gathered, and every rank must enter; a layer on disk is read once. Raises a
    `ValueError` if the model is only described.
    """
    dense.require("memory", "shards", "disk")
    layer: Any = dense.family.layers(dense.model)[index]
    if dense.weights == "disk":
        with held_in_memory(layer):
            yield
        return
    if dense.weights == "shards":
        layer.set_reshard_after_forward(False)
        layer.unshard()
    try:
        yield
    finally:
        if dense.weights == "shards":
            layer.reshard()
            layer.set_reshard_after_forward(True)


@torch.no_grad()
def fill_own_rows(parameter: Tensor, tensors: Tensors, name: str) -> None:
    """Read this rank's rows of one tensor."""
    rows = own_rows(parameter)
    local_part(parameter).copy_(tensors.read_rows(name, rows))
