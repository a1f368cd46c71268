"""Estimates of what a conversion would give and cost, from the config alone."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from tyro.conf import Positional

from dotmoe.common.distributed import resolved_device
from dotmoe.common.errors import UserError
from dotmoe.common.options import at_least, check
from dotmoe.export import settled_experts
from dotmoe.export.architectures import FORMATS
from dotmoe.export.choice import format_for
from dotmoe.export.format import EXPORTED, yarn_notes
from dotmoe.export.llama_cpp import most_active_experts_of
from dotmoe.export.transformers_format import TransformersFormat, limits_met
from dotmoe.measure.inspection.planner import (
    ACCELERATORS,
    Accelerator,
    dtype_name,
    measured_here,
    plan,
    repair_flops,
)
from dotmoe.measure.inspection.sizes import (
    Sizes,
    Step,
    calibration_memory,
    disk,
    exported_bytes,
    repair_memory,
)
from dotmoe.method.align import AlignConfig
from dotmoe.method.calibrate import CalibrateConfig
from dotmoe.method.finetuning import FinetuneConfig
from dotmoe.method.granularity import ExpertsConfig, Granularity, splits_of
from dotmoe.method.repair import RepairConfig
from dotmoe.models.checkpoint import Tensors
from dotmoe.models.family import DenseModel, family_of, meta_model


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectConfig:
    """Options of an inspection: the model, its split, and the run to plan."""

    model: Annotated[Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Local folder, GGUF file or hub name of the dense model; `embedded` is the bundled one."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    task: Literal["align", "finetune"] = "align"
    """The training to plan: the alignment, or the finetuning of its result."""
    steps: Annotated[int, at_least(0)] | None = None
    """Number of optimizer steps of the task; 0: none. Default: the paper's number, whereas `dotmoe
    convert` takes none by default."""
    batch_size: Annotated[int, at_least(1)] | None = None
    """Sequences per step. Default: the paper's number."""
    seq_len: Annotated[int, at_least(1)] = 2_048
    """Tokens per sequence. Paper: 2,048 (tab:hyperparams_moefication)."""
    train: Literal["everything", "router", "lora"] = "everything"
    """What finetuning trains: all weights and the routers, only the routers, or low-rank adapters
    on experts and attention together with the routers."""
    device: str = "auto"
    """Device to plan for and to measure: cpu, cuda, or auto (a GPU if there is one)."""
    gpu: Literal[tuple(ACCELERATORS)] | None = None  # type: ignore[valid-type]
    """GPU type to plan for. Default: this machine, and every known type."""
    gpus: Annotated[int, at_least(1)] | None = None
    """GPUs per node. Default: 1 and 8."""
    nodes: Annotated[int, at_least(1)] = 1
    """Number of nodes with that many GPUs each, joined by InfiniBand."""
    export_dtype: Literal["source", "float32", "bfloat16"] = "source"
    """Dtype of the exported weights, as for convert; `source` keeps the checkpoint's."""
    json: bool = False
    """Print JSON instead of tables, with the items that each size is the sum of, and all ways to
    run that were compared."""


def inspect_model(
    config: Any, options: InspectConfig, *, stored: torch.dtype, here: Accelerator | None = None
) -> dict[str, Any]:
    """Sizes, costs and warnings of converting a model of this Hugging Face config, as JSON values.

    `stored` is the dtype of its checkpoint. `here` is this machine; None measures it (0.6 s, and as
    long again in float32 if its dtype is another). Raises a `UserError` if the family is not
    supported, the split does not fit the model, a size is out of range, or the device is absent.
    """
    check(options)
    is_alignment, device = options.task == "align", resolved_device(options.device)
    written = EXPORTED.get(stored, torch.bfloat16)
    if options.export_dtype != "source":
        written = getattr(torch, options.export_dtype)
    model, family = meta_model(config), family_of(config)
    dense = DenseModel(model=model, weights="meta", family=family, source=options.model)
    experts = settled_experts(options.experts, dense, "auto", written)
    split = splits_of(experts, config.intermediate_size, config.num_attention_heads)
    if not is_alignment and options.experts.targets != "ffn":
        raise UserError(
            f"task is finetune, but targets is {options.experts.targets}: experts made of heads "
            "are repaired, not trained. Leave one of the two out."
        )
    form = _format_or_refusal(dense, split, written)
    sizes = Sizes(config, split, stored=stored, written=written)
    paper = AlignConfig() if is_alignment else FinetuneConfig()
    steps = paper.steps if options.steps is None else options.steps
    step = Step(
        sizes=sizes,
        batch_size=options.batch_size or paper.batch_size,
        seq_len=min(options.seq_len, sizes.widths.context),
        train="assignment" if is_alignment else options.train,
    )
    if here is None:
        is_narrow = device.type != "cpu" and stored.itemsize == 2
        here = measured_here(device, torch.bfloat16 if is_narrow else torch.float32)
    in_float32 = here if here.dtype == "float32" else measured_here(device, torch.float32)
    tokens, calibrated = steps * step.tokens, CalibrateConfig().tokens(sizes.widths.model)
    repair = RepairConfig()
    repaired = repair.tokens(split, config)
    repairing = repair_flops(sizes, repaired, repair.repair_epochs)
    repair_s = repairing / (in_float32.efficiency.products * in_float32.flops_per_s)
    items = {
        "calibration_memory": calibration_memory(sizes, calibrated, here.held),
        "repair_memory": repair_memory(sizes, repaired, here.held),
        "disk": disk(sizes, tokens + calibrated),
        "exported": exported_bytes(sizes),
    }
    machines = [] if options.gpu else [(here, 1, 1)]
    for name in [options.gpu] if options.gpu else ACCELERATORS:
        for gpus in [options.gpus] if options.gpus else (1, 8):
            machines.append((ACCELERATORS[name], gpus, options.nodes))
    return {
        "origin": "estimated",
        "model_type": config.model_type,
        "widths": sizes.widths._asdict(),
        "stored_dtype": dtype_name(stored),
        "written_dtype": dtype_name(written),
        "granularity": asdict(split),
        "counts": asdict(sizes.counts),
        "run": {
            "task": options.task,
            "steps": steps,
            "batch_size": step.batch_size,
            "seq_len": step.seq_len,
            "tokens": tokens,
            "calibration_tokens": calibrated,
            "repair_tokens": repaired,
            "device": str(device),
        },
        **items,
        **{f"{name}_total": sum(each.values()) for name, each in items.items()},
        "repair_flops": repairing,
        "here": asdict(here) | {"held": here.held, "hours_repair": repair_s / 3_600},
        "plans": [plan(step, *machine, tokens=tokens) for machine in machines if tokens],
        "warnings": _warnings(dense, sizes, options, form),
        "limits": _limits(dense, split, form, dtype_name(written)),
    }


def stored_dtype(config: Any, folder: Path) -> torch.dtype:
    """Dtype of the FFN weights in a checkpoint, else the config's, else bfloat16."""
    if not any(folder.glob("*.safetensors")):
        dtype = getattr(config, "dtype", None) or torch.bfloat16
        return getattr(torch, dtype) if isinstance(dtype, str) else dtype
    family = family_of(config)
    return Tensors(folder, tied=False, part_of=lambda name: family.stored(config, name)).dtype


def _warnings(
    dense: DenseModel, sizes: Sizes, options: InspectConfig, form: TransformersFormat | str
) -> list[str]:
    """Warnings about one conversion; what the export would refuse comes first."""
    split, widths, traits = sizes.split, sizes.widths, sizes.traits
    of_neurons, served = split.target == "ffn", not sizes.has_heads
    size, active = split.expert_size, split.active_experts
    context = widths.context if isinstance(form, str) else form.context(dense)
    rope_type = dense.config.rope_parameters["rope_type"]
    only_llama = rope_type in ("llama3", "yarn") or traits.output_bias  # not in gguf_glm4moe
    most = most_active_experts_of(traits, split, widths.layers, 5 if only_llama else 8)
    sentences = {
        f"Export refuses weights stored as {dtype_name(sizes.stored)}. Give --export-dtype "
        "bfloat16 (rounds the weights; assumed here) or float32 (twice the size).": (
            options.export_dtype == "source" and sizes.stored not in EXPORTED
        ),
        "float16 weights are exported as float32 (exact, twice the size), because float16 cannot "
        "hold the scaled routers; --export-dtype bfloat16 rounds the weights.": (
            options.export_dtype == "source" and sizes.stored == torch.float16
        ),
        f"Export refuses this: {form}": isinstance(form, str),
        "Only some attention heads run per token, which no server supports: the checkpoint runs "
        "only in Transformers, with its own code (trust_remote_code=True). vLLM, "
        "SGLang and llama.cpp cannot load it, and there is no GGUF of it.": sizes.has_heads,
        f"{active} experts run per token; llama.cpp runs at most {most} of this model, so a GGUF "
        "of it is refused. With larger experts fewer run.": served and active > most,
        f"Experts have {size} neurons, not a multiple of 64: GPU kernels pad or slow down, and "
        "llama.cpp quantises down_proj in multiples of 32 only.": of_neurons and size % 64 > 0,
        f"Attention has a window of {context:,} tokens, and no format that holds this split has "
        f"one: the context is lowered from {widths.context:,} to {context:,}, and exact up to that "
        "length.": context < widths.context,
    }
    found = [sentence for sentence, applies in sentences.items() if applies]
    return found + yarn_notes(dense.config)


def _limits(
    dense: DenseModel, split: Granularity, form: TransformersFormat | str, dtype: str
) -> list[str]:
    """What servers get wrong, or need, with this split in its format."""
    if isinstance(form, str) or "vLLM" not in form.servers:
        return []
    return limits_met(form.config(dense, split, dtype))


def _format_or_refusal(
    dense: DenseModel, split: Granularity, written: torch.dtype
) -> TransformersFormat | str:
    """The format of the export, or why none can hold this; raised if no layer is split."""
    try:
        return FORMATS[format_for(dense, split, "auto", written).name]
    except UserError as error:
        if split.first_dense_layers >= dense.widths.layers:
            raise
        return str(error)
