"""What is asked of an inspection, and all that its estimates read of a model and of a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from tyro.conf import Positional

from dotmoe.checkpoint import Tensors
from dotmoe.errors import UserError
from dotmoe.granularity import ExpertsConfig, Granularity, parts_of, targets_of
from dotmoe.models.family import DecoderTraits, Family, Widths, widths_of
from dotmoe.options import at_least
from dotmoe.parameters import ParameterCounts, count_parameters

Items = Mapping[str, int]
"""Bytes by what they are for."""

PAPER_TOKENS = 3_500 * 64 * 2_048
"""Tokens of the paper's alignment: steps, batch size, sequence length."""
FLOAT32 = 4
EXPORTED = (torch.float32, torch.bfloat16)
"""Dtypes whose range and spacing hold the scaled routers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectConfig:
    """What to look at before paying for a conversion."""

    model: Annotated[Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Local folder, GGUF file or hub name of the dense model; `embedded` is the bundled one."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    steps: Annotated[int, at_least(0)] = 3_500
    """Optimizer steps of an alignment (`dotmoe convert --steps`, by itself 0). Paper: 3,500."""
    batch_size: Annotated[int, at_least(1)] = 64
    """Sequences a step. Paper: 64 (tab:hyperparams_moefication)."""
    seq_len: Annotated[int, at_least(1)] = 2_048
    """Tokens a sequence. Paper: 2,048 (tab:hyperparams_moefication)."""
    micro_batch_size: Annotated[int, at_least(1)] = 4
    """Sequences that are in memory at once; at most `batch_size`."""
    bytes_per_weight: Literal[2, 4] | None = None
    """Bytes of a dense weight in memory. Left out: 4 on a CPU, the checkpoint's on a GPU."""
    calibration_tokens: Annotated[int, at_least(0)] | None = None
    """Tokens seen by the training-free start; 0 for none. Left out: 40 a model dimension."""
    device: str = "auto"
    """Where it would run, and what is measured: cpu, cuda, or auto (a GPU if there is one)."""
    task: Literal["align", "finetune"] = "align"
    """What GPUs are to do: the alignment, or fine-tuning of what it gave."""
    gpu: Literal["a100", "h100", "h200", "b200", "l40s"] | None = None
    """GPU type. Left out: each of them."""
    gpus: Annotated[int, at_least(1)] | None = None
    """GPUs of one node. Left out: 1 and 8."""
    nodes: Annotated[int, at_least(1)] = 1
    """Nodes of so many GPUs, joined by InfiniBand."""
    finetune_tokens: Annotated[int, at_least(1)] = 1_200_000_000
    """Tokens of fine-tuning. Paper: 1.2B."""
    finetune_batch_size: Annotated[int, at_least(1)] = 128
    """Sequences a step of fine-tuning. Paper: 128 (tab:hyperparams_sft)."""
    train: Literal["everything", "router", "lora"] = "everything"
    """What fine-tuning trains: all weights and the routers, the routers alone, or low-rank
    adapters on experts and attention and the routers."""
    lora_rank: Annotated[int, at_least(1)] = 16
    """Rank of the adapters."""
    export_dtype: Literal["source", "float32", "bfloat16"] = "source"
    """Dtype of the exported weights, as for convert; `source` keeps the checkpoint's."""
    details: bool = False
    """List what each size of memory and disk is the sum of, and all ways that were weighed."""
    json: bool = False
    """Print JSON, always with details, instead of tables."""

    def check_together(self) -> None:
        """Refuse a micro-batch larger than the batch."""
        if self.micro_batch_size > self.batch_size:
            raise UserError(
                f"micro_batch_size is {self.micro_batch_size}, more than batch_size "
                f"{self.batch_size}. Choose 1 to {self.batch_size}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """All that the estimates read about a model and its split.

    Dtypes are those of the dense checkpoint (`stored`) and of the exported one (`written`); `held`
    are the bytes of a dense weight in memory while working.
    """

    widths: Widths
    traits: DecoderTraits
    split: Granularity
    counts: ParameterCounts
    heads: int
    """Query heads a layer."""
    head_width: int
    """Entries of all queries and keys of a token in one layer."""
    stored: torch.dtype
    written: torch.dtype
    held: Literal[2, 4]

    @property
    def moe_layers(self) -> int:
        """Layers that are split."""
        return self.widths.layers - self.split.first_dense_layers

    @property
    def affinities_of_a_layer(self) -> int:
        """Entries of A of all targets in a layer that is split."""
        return sum(part.units * part.columns for part in parts_of(self.split))

    @property
    def affinities(self) -> int:
        """Entries of A in the layers that are split."""
        return self.moe_layers * self.affinities_of_a_layer

    @property
    def repaired_inputs(self) -> list[int]:
        """Inputs of W_down, W_O or both, of those that a repair refits."""
        inputs = {"ffn": self.widths.ffn, "attention": self.heads * self.traits.head_dim}
        return [inputs[part.target] for part in parts_of(self.split)]

    @property
    def has_heads(self) -> bool:
        """Whether some experts are made of heads."""
        return targets_of(self.split) != "ffn"

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: attention, its norms, FFN."""
        # The last norm, of the model width, belongs to no layer.
        in_layers = self.counts.attention_and_norms - self.widths.model + self.counts.ffn_total
        return in_layers // self.widths.layers


def sizes_of(config: Any, family: Family, split: Granularity, **dtypes: Any) -> Sizes:
    """Gather what the estimates need, from a Hugging Face config, the split and the dtypes."""
    traits = family.traits(config)
    return Sizes(
        widths=widths_of(config),
        traits=traits,
        split=split,
        counts=count_parameters(config, family, split),
        heads=config.num_attention_heads,
        head_width=(config.num_attention_heads + config.num_key_value_heads) * traits.head_dim,
        **dtypes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One optimizer step on one of several GPUs that share it, of the alignment or a fine-tuning.

    Sharded weights lie as FSDP2 does it: every tensor by rows, and a layer whole only while it
    runs. Affinities and their Adam moments are always divided by layer; routers are small and
    whole everywhere.
    """

    sizes: Sizes
    batch_size: int
    """Sequences of all GPUs."""
    seq_len: int
    micro_batch_size: int
    """Sequences in memory at once on each GPU."""
    train: Literal["assignment", "everything", "router", "lora"] = "assignment"
    """`assignment`: an alignment, with a teacher, all experts and the dense weights frozen."""
    lora_rank: int = 16
    on_cpu: bool = False
    checkpointing: bool = False
    """Keep only each layer's input, and compute the layer again in the backward."""
    ranks: int = 1
    """GPUs of all nodes."""
    sharded: bool = False
    """Each GPU keeps a part of every dense weight."""

    @property
    def is_alignment(self) -> bool:
        """Whether assignment and routers are learned, from a teacher."""
        return self.train == "assignment"

    @property
    def neurons(self) -> int:
        """Of an FFN that compute for a token."""
        split = self.sizes.split
        all_run = self.is_alignment or split.target == "attention"
        return self.sizes.widths.ffn if all_run else split.active_units

    @property
    def own_affinities(self) -> int:
        """Entries of A on this GPU, [L / ranks, N, E]; where layers do not divide, the most."""
        return self.part(self.sizes.moe_layers) * self.sizes.affinities_of_a_layer

    @property
    def trained(self) -> int:
        """How many parameters fine-tuning trains, on all GPUs together.

        An adapter of a projection from a to b has rank * (a + b) entries; all of attention has
        them, and each expert's three projections.
        """
        sizes, split, width = self.sizes, self.sizes.split, self.sizes.widths.model
        if self.train != "lora":
            return sizes.counts.stored if self.train == "everything" else sizes.counts.routers
        entries = sizes.widths.layers * (4 * width + 2 * sizes.head_width)
        entries += sizes.moe_layers * 3 * split.num_experts * (width + split.expert_size)
        return sizes.counts.routers + self.lora_rank * entries

    def part(self, number: int) -> int:
        """The part of so many on one GPU; where they do not divide, the largest."""
        return -(-number // self.ranks)


def stored_dtype(config: Any, family: Family, folder: Path) -> torch.dtype:
    """Dtype of the FFN weights in a checkpoint, or the config's while no weights are there.

    Where neither says anything it is bfloat16.

    Raises:
        UserError: A file is damaged or missing, or its weights are not plain numbers.
    """
    if not any(folder.glob("*.safetensors")):
        dtype = getattr(config, "dtype", None) or torch.bfloat16
        return getattr(torch, dtype) if isinstance(dtype, str) else dtype
    tensors = Tensors(folder, tied=False, part_of=lambda name: family.stored(config, name))
    return tensors.dtype


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`, not `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
