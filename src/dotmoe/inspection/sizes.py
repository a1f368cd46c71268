"""What is asked of an inspection, and all that its estimates read of a model and its split."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from dotmoe.errors import UserError, one_line
from dotmoe.files import read_json
from dotmoe.granularity import Granularity
from dotmoe.models.family import Family, Widths, widths_of
from dotmoe.models.traits import DecoderTraits
from dotmoe.options import at_least
from dotmoe.parameters import ParameterCounts, count_parameters

Items = Mapping[str, int]
"""Bytes by what they are for."""

ExportDtype = Literal["source", "float32", "bfloat16"]
GPUName = Literal["a100", "h100", "h200", "b200", "l40s"]

PAPER_TOKENS = 3_500 * 64 * 2_048
"""Tokens of the paper's alignment: steps, batch size, sequence length."""
EXPORTED = (torch.float32, torch.bfloat16)
"""Dtypes whose range and spacing hold the scaled routers."""
FLOAT32 = 4

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSize:
    """Size of an alignment run, for estimates."""

    steps: Annotated[int, at_least(0)] = 3_500
    """Optimizer steps; 0 for the training-free start alone. Paper: 3,500."""
    batch_size: Annotated[int, at_least(1)] = 64
    """Sequences a step. Paper: 64 (tab:hyperparams_moefication)."""
    seq_len: Annotated[int, at_least(1)] = 2_048
    """Tokens a sequence. Paper: 2,048 (tab:hyperparams_moefication)."""
    micro_batch_size: Annotated[int, at_least(1)] = 4
    """Sequences that are in memory at once; at most `batch_size`."""
    bytes_per_weight: Literal[2, 4] | None = None
    """Bytes of a dense weight in memory. Left out: 4 on a CPU, the checkpoint's on a GPU."""
    calibration_tokens: Annotated[int, at_least(0)] = 8_192
    """Tokens seen by the training-free start; 0 for none."""
    device: str = "auto"
    """Where it would run, and what is measured: cpu, cuda, or auto (a GPU if there is one)."""

    def check_together(self) -> None:
        """Refuse a micro-batch larger than the batch."""
        if self.micro_batch_size > self.batch_size:
            raise UserError(
                f"micro_batch_size is {self.micro_batch_size}, more than batch_size "
                f"{self.batch_size}. Choose 1 to {self.batch_size}."
            )

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.steps * self.batch_size * self.seq_len


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneSize:
    """Size of a fine-tuning of the converted model, for estimates with --task finetune."""

    finetune_tokens: Annotated[int, at_least(1)] = 1_200_000_000
    """Tokens of fine-tuning. Paper: 1.2B."""
    finetune_batch_size: Annotated[int, at_least(1)] = 128
    """Sequences a step of fine-tuning. Paper: 128 (tab:hyperparams_sft)."""
    train: Literal["everything", "router", "lora"] = "everything"
    """What fine-tuning trains: all weights and the routers, the routers alone, or low-rank
    adapters on experts and attention and the routers."""
    lora_rank: Annotated[int, at_least(1)] = 16
    """Rank of the adapters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """GPUs to plan for."""

    task: Literal["align", "finetune"] = "align"
    """What they are to do: the alignment, or fine-tuning of what it gave."""
    gpu: GPUName | None = None
    """GPU type. Left out: each of them."""
    gpus: Annotated[int, at_least(1)] | None = None
    """GPUs of one node. Left out: 1 and 8."""
    nodes: Annotated[int, at_least(1)] = 1
    """Nodes of so many GPUs, joined by InfiniBand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """All that the estimates read about a model and its split."""

    widths: Widths
    traits: DecoderTraits
    split: Granularity
    counts: ParameterCounts
    heads: int
    """Query heads a layer."""
    kv_heads: int
    """Key and value heads a layer."""
    stored: torch.dtype
    """Of the weights in the dense checkpoint."""
    written: torch.dtype
    """Of the weights in the exported checkpoint."""
    held: Literal[2, 4]
    """Bytes of a dense weight in memory while working."""

    @property
    def moe_layers(self) -> int:
        """Layers that are split."""
        return self.widths.layers - self.split.first_dense_layers

    @property
    def affinities(self) -> int:
        """Entries of A in the layers that are split."""
        return self.moe_layers * self.widths.ffn * self.split.num_experts

    @property
    def head_width(self) -> int:
        """Entries of all queries and keys of a token in one layer."""
        return (self.heads + self.kv_heads) * self.traits.head_dim

    @property
    def head_norms(self) -> int:
        """Those that a norm sees; 0 where queries and keys have none."""
        return 0 if self.traits.qk_norm == "none" else self.head_width

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: attention, its norms, FFN."""
        # The last norm, of the model width, belongs to no layer.
        in_layers = self.counts.attention_and_norms - self.widths.model + self.counts.ffn_total
        return in_layers // self.widths.layers

    def adapters(self, rank: int, *, experts: bool = True) -> int:
        """Entries of low-rank adapters of all attention projections, and of each expert's three.

        A projection of a to b has adapters of rank * (a + b).
        """
        width = self.widths.model
        entries = self.widths.layers * (4 * width + 2 * self.head_width)
        if experts:
            a_layer = 3 * self.split.num_experts * (width + self.split.expert_size)
            entries += self.moe_layers * a_layer
        return rank * entries

    def trained(self, size: FinetuneSize) -> int:
        """How many parameters fine-tuning trains."""
        others = {"router": 0, "everything": self.counts.dense_total}
        return self.counts.routers + others.get(size.train, self.adapters(size.lora_rank))


def sizes_of(
    config: Any,
    family: Family,
    split: Granularity,
    *,
    stored: torch.dtype,
    written: torch.dtype,
    held: Literal[2, 4],
) -> Sizes:
    """Gather what the estimates need, from a Hugging Face config and what was decided besides."""
    return Sizes(
        widths=widths_of(config),
        traits=family.traits(config),
        split=split,
        counts=count_parameters(config, family, split),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        stored=stored,
        written=written,
        held=held,
    )


def stored_dtype(config: Any, family: Family, folder: Path) -> torch.dtype:
    """Dtype of the FFN weights: from the header of their file, else as the config says.

    Where neither says anything it is bfloat16. A checkpoint may be only partly there: what is
    missing is for loading to report.

    Raises:
        UserError: The file is there but damaged, or its weights are not plain numbers.
    """
    name = family.stored(config, family.ffn_tensor(0, "gate")).stored
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not file.is_file() and index.is_file():
        file = folder / str(read_json(index).get("weight_map", {}).get(name))
    if not file.is_file():
        dtype = getattr(config, "dtype", None) or torch.bfloat16
        return getattr(torch, dtype) if isinstance(dtype, str) else dtype
    try:
        with safe_open(file, framework="pt") as tensors:
            found = tensors.get_slice(name).get_dtype()
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({one_line(error)}). Get it again.") from error
    if found not in _DTYPES:
        raise UserError(
            f"{name} in {file} is stored as {found}, but weights must be one of "
            f"{', '.join(_DTYPES)}. Choose a checkpoint that is not quantised."
        )
    return _DTYPES[found]


def written_dtype(stored: torch.dtype, export_dtype: ExportDtype) -> torch.dtype:
    """Dtype of the exported weights; bfloat16 where the stored one needs another choice first."""
    if export_dtype != "source":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[export_dtype]
    return stored if stored in EXPORTED else torch.bfloat16


def bytes_held(asked: Literal[2, 4] | None, device_type: str, stored: torch.dtype) -> Literal[2, 4]:
    """Bytes of a dense weight while working, as `--dtype auto` has it unless asked otherwise.

    Example:
        >>> [bytes_held(None, device, torch.bfloat16) for device in ("cpu", "cuda")]
        [4, 2]
    """
    return asked or (4 if device_type == "cpu" or stored.itemsize > 2 else 2)


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`, not `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
