"""What a conversion would give and cost, from the config alone: before anything is paid."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from tyro.conf import Positional

from dotmoe.calibrate import CalibrateConfig
from dotmoe.checkpoint import Tensors
from dotmoe.distributed import resolved_device
from dotmoe.errors import UserError
from dotmoe.finetuning.repair import RepairConfig
from dotmoe.granularity import (
    GROUPED_MATMUL_BYTES,
    ExpertsConfig,
    fitting_sizes,
    next_to,
    splits_of,
)
from dotmoe.inspection.planner import (
    ACCELERATORS,
    Accelerator,
    dtype_name,
    measured_here,
    on_machine,
    plan,
    products,
    repair_flops,
)
from dotmoe.inspection.sizes import (
    Sizes,
    Step,
    calibration_memory,
    disk,
    exported_bytes,
    repair_memory,
)
from dotmoe.llama_cpp import most_active_experts_of
from dotmoe.models.family import Multipliers, family_of
from dotmoe.options import at_least, check
from dotmoe.tables import in_bytes

PAPER_TOKENS = 3_500 * 64 * 2_048
"""Tokens of the paper's alignment: steps, batch size, sequence length."""
EXPORTED = (torch.float32, torch.bfloat16)
"""Dtypes whose range and spacing hold the scaled routers."""
FUSED_ROUTING_LIMIT = 32
"""Active experts that fused routing kernels of servers handle."""
MANY_LAYERS = 16
"""From so many on one dense layer costs few parameters; of a model of 5 it did not pay."""
LARGEST_STOCK_EXPERTS = 512
"""Experts a layer of the widest stock MoE models."""


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
    """Sequences that are in memory at once, at most `batch_size`."""
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


def inspect_model(
    config: Any, asked: InspectConfig, *, stored: torch.dtype, here: Accelerator | None = None
) -> dict[str, Any]:
    """Sizes, costs and warnings of converting a model of this Hugging Face config, as JSON values.

    `stored` is the dtype of its checkpoint. `here` is this machine; None measures it (0.6 s, and as
    long in float32, if it is not that). Raises a `UserError`: the family is not supported, the
    split does not fit the model, a size is out of range, or the device is not there.
    """
    check(asked)
    asked = replace(asked, micro_batch_size=min(asked.micro_batch_size, asked.batch_size))
    device = resolved_device(asked.device)
    held = asked.bytes_per_weight or (4 if device.type == "cpu" or stored.itemsize > 2 else 2)
    written = stored if stored in EXPORTED else torch.bfloat16
    if asked.export_dtype != "source":
        written = getattr(torch, asked.export_dtype)
    split = splits_of(asked.experts, config.intermediate_size, config.num_attention_heads)
    if asked.task == "finetune" and asked.experts.targets != "ffn":
        raise UserError(
            f"task is finetune, but targets is {asked.experts.targets}: experts made of heads are "
            "repaired, not trained. Leave one of the two out."
        )
    sizes = Sizes(config, split, stored=stored, written=written)
    seq_len = min(asked.seq_len, sizes.widths.context)
    calibrated = asked.calibration_tokens
    if calibrated is None:
        calibrated = CalibrateConfig().tokens(sizes.widths.model)
    if here is None:
        here = measured_here(device, torch.bfloat16 if held == 2 else torch.float32)
    in_float32 = here if here.dtype == "float32" else measured_here(device, torch.float32)
    step = Step(
        sizes=sizes,
        batch_size=asked.batch_size,
        seq_len=seq_len,
        micro_batch_size=asked.micro_batch_size,
        held=held,
        on_cpu=device.type == "cpu",
    )
    plain, again = (on_machine(replace(step, checkpointing=c), here) for c in (False, True))
    tokens, repair = asked.steps * asked.batch_size * seq_len, RepairConfig()
    repaired = repair.tokens(split, config)
    repairing = repair_flops(sizes, repaired, repair.repair_epochs)
    float32_rate = in_float32.efficiency.products * in_float32.flops_per_s
    items = {
        "calibration_memory": calibration_memory(sizes, calibrated, held),
        "repair_memory": repair_memory(sizes, repaired, held),
        "memory": plain["memory"],
        "memory_checkpointing": again["memory"],
        "disk": disk(sizes, tokens + calibrated),
        "exported": exported_bytes(sizes),
    }
    return {
        "origin": "estimated",
        "model_type": config.model_type,
        "widths": sizes.widths._asdict(),
        "stored_dtype": dtype_name(stored),
        "written_dtype": dtype_name(written),
        "granularity": asdict(split),
        "active_neuron_fraction": split.active_fraction,
        "counts": asdict(sizes.counts),
        "active_parameter_fraction": sizes.counts.active_fraction,
        "run": {
            **{name: getattr(asked, name) for name in ("steps", "batch_size", "micro_batch_size")},
            "calibration_tokens": calibrated,
            "seq_len": seq_len,
            "tokens": tokens,
            "repair_tokens": repaired,
            "bytes_per_weight": held,
            "device": str(device),
        },
        **items,
        **{f"{name}_total": sum(each.values()) for name, each in items.items()},
        "flops": asked.steps * sum(products(step).values()),
        "repair_flops": repairing,
        "here": {
            **asdict(here),
            "hours_repair": repairing / float32_rate / 3_600,
            "hours": asked.steps * plain["step_s"] / 3_600,
            "hours_checkpointing": asked.steps * again["step_s"] / 3_600,
        },
        "plans": _plans(step, asked, tokens),
        "warnings": _warnings(sizes, asked, config.rope_parameters.get("rope_type", "default")),
    }


def _plans(step: Step, asked: InspectConfig, tokens: int) -> list[dict[str, Any]]:
    """For each GPU type and number that is asked for, with 16-bit weights."""
    step = replace(step, held=2, on_cpu=False)
    if asked.task == "finetune":
        batch, rank = asked.finetune_batch_size, asked.lora_rank
        step = replace(step, batch_size=batch, train=asked.train, lora_rank=rank)
        a_step = batch * step.seq_len
        tokens = -(-asked.finetune_tokens // a_step) * a_step
    if not tokens:
        return []
    return [
        plan(step, ACCELERATORS[name], gpus=gpus, nodes=asked.nodes, tokens=tokens)
        for name in ([asked.gpu] if asked.gpu else ACCELERATORS)
        for gpus in ([asked.gpus] if asked.gpus else (1, 8))
    ]


def stored_dtype(config: Any, folder: Path) -> torch.dtype:
    """Dtype of the FFN weights in a checkpoint, else the config's, else bfloat16."""
    if not any(folder.glob("*.safetensors")):
        dtype = getattr(config, "dtype", None) or torch.bfloat16
        return getattr(torch, dtype) if isinstance(dtype, str) else dtype
    family = family_of(config)
    return Tensors(folder, tied=False, part_of=lambda name: family.stored(config, name)).dtype


def _warnings(sizes: Sizes, asked: InspectConfig, rope_type: str) -> list[str]:
    """Sentences about one conversion, what the export would refuse first."""
    split, widths, traits = sizes.split, sizes.widths, sizes.traits
    of_neurons = split.target == "ffn"
    size, experts, active = split.expert_size, split.num_experts, split.active_experts
    only_llama = rope_type in ("llama3", "yarn") or traits.output_bias  # not in gguf_glm4moe
    most = most_active_experts_of(traits, split, widths.layers, 5 if only_llama else 8)
    served = not sizes.has_heads
    window = traits.sliding_window or widths.context
    extra = in_bytes(exported_bytes(sizes)["tied head written out"])
    seen = asked.steps * asked.batch_size * min(asked.seq_len, widths.context)
    found = {
        f"Export refuses weights stored as {dtype_name(sizes.stored)}. Give --export-dtype "
        "bfloat16 (rounds the weights; assumed here) or float32 (twice the size).": (
            asked.export_dtype == "source" and sizes.stored not in EXPORTED
        ),
        "Some heads of attention run per token, which no server can do: the checkpoint runs in "
        "Transformers alone, by code of its own (import dotmoe, or trust_remote_code=True). vLLM, "
        "SGLang and llama.cpp cannot load it, and there is no GGUF of it.": sizes.has_heads,
        **(_refused_widths(sizes) if of_neurons else {}),
        f"{active} experts run per token; llama.cpp runs at most {most} of this model, so a GGUF "
        "of it is refused. Larger experts need fewer.": served and active > most,
        f"{active} experts run per token; fused routing kernels of some servers take at most "
        f"{FUSED_ROUTING_LIMIT} and fall back to slower ones. Larger experts need fewer.": (
            served and active > FUSED_ROUTING_LIMIT
        ),
        f"Experts have {size} neurons, not a multiple of 64: GPU kernels pad or slow down, and "
        "llama.cpp quantises down_proj in multiples of 32 only.": of_neurons and size % 64 > 0,
        f"A layer has {experts} experts; stock MoE models stop at {LARGEST_STOCK_EXPERTS}, and "
        "servers' kernels are untried beyond. Larger experts make fewer.": (
            experts > LARGEST_STOCK_EXPERTS
        ),
        "SmolLM2-135M kept more with its first layer dense (--first-dense-layers 1) and half of "
        "what runs always on (--shared).": (
            of_neurons
            and widths.layers >= MANY_LAYERS
            and not (split.first_dense_layers and split.shared_size)
            and not (traits.norms_after or traits.output_bias)  # whose formats hold neither
            and traits.multipliers == Multipliers()
        ),
        "The output head is tied to the embedding; servers of the exported format do not tie, so "
        f"it is written out: {extra} more.": sizes.counts.output_head == 0,
        f"Attention slides over {window:,} tokens, which the exported format cannot: its context "
        f"is lowered from {widths.context:,} to {window:,}, exact up to there.": (
            served and window < widths.context
        ),
        f"Sequences are shortened from {asked.seq_len:,} to {widths.context:,} tokens, the "
        "model's context.": asked.seq_len > widths.context,
        f"The run sees {seen:,} tokens; the paper's alignment saw {PAPER_TOKENS:,} (3,500 steps of "
        "64 x 2,048). Expect to lose more quality than it reports.": (
            0 < asked.steps * asked.batch_size * asked.seq_len < PAPER_TOKENS
        ),
    }
    return [sentence for sentence, applies in found.items() if applies]


def _refused_widths(sizes: Sizes) -> dict[str, bool]:
    """Expert size and model width that stock Transformers cannot run, with what it can."""
    size, width = sizes.split.expert_size, sizes.widths.model
    multiple = GROUPED_MATMUL_BYTES // sizes.written.itemsize
    nearest = next_to(size, fitting_sizes(sizes.split.units, multiple))
    remedy = f"Give --expert-size {' or '.join(map(str, nearest))}."
    if width % multiple or not nearest:
        remedy = "Choose another model, or for bfloat16 --export-dtype float32 (multiples of 4)."
    return {
        f"Export refuses {what} {value}: in {dtype_name(sizes.written)}, Transformers runs experts "
        f"in multiples of {multiple} only. {remedy}": value % multiple > 0
        for what, value in {"expert size": size, "model width": width}.items()
    }
