"""What a conversion would give and cost, before anything is downloaded, allocated or paid."""

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import torch

from dotmoe.device import resolved_device
from dotmoe.granularity import ExpertsConfig, Granularity, resolve
from dotmoe.inspection.costs import (
    alignment_flops,
    alignment_memory,
    calibration_memory,
    disk,
    export_memory,
    exported_bytes,
)
from dotmoe.inspection.device_time import DeviceRates, TimeHere, measure_rates, time_here
from dotmoe.inspection.dtypes import ExportDtype, bytes_held, dtype_name, written_dtype
from dotmoe.inspection.finetuning import FinetuneSize
from dotmoe.inspection.limits import warnings_for
from dotmoe.inspection.planner import Machines, Plan, plans
from dotmoe.inspection.sizes import Item, RunSize, Sizes, sizes_of, total
from dotmoe.inspection.step_time import ON_CPU, ON_GPU
from dotmoe.inspection.tasks import Alignment, Finetuning
from dotmoe.models.family import Family
from dotmoe.parameters import ParameterCounts, count_parameters

_ITEMISED = (
    "calibration_memory",
    "memory",
    "memory_checkpointing",
    "export_memory",
    "disk",
    "exported",
    "flops",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Everything that `dotmoe inspect` shows; each list of items adds up to the total shown."""

    model_type: str
    layers: int
    model_width: int
    ffn_width: int
    vocabulary: int
    context: int
    stored_dtype: str
    """Of the weights in the dense checkpoint."""
    written_dtype: str
    """Of the weights in the exported checkpoint."""
    granularity: Granularity
    """The same for every layer."""
    counts: ParameterCounts
    run: RunSize
    """As it would run: device and bytes per weight resolved, sequences within the context."""
    memory: tuple[Item, ...]
    """Alignment, bytes, without activation checkpointing."""
    memory_checkpointing: tuple[Item, ...]
    """Alignment, bytes, with activation checkpointing."""
    calibration_memory: tuple[Item, ...]
    """Start from data, bytes; before alignment, not on top of it."""
    export_memory: tuple[Item, ...]
    """Export and its verification, bytes."""
    disk: tuple[Item, ...]
    """Bytes."""
    exported: tuple[Item, ...]
    """The exported checkpoint, bytes; part of `disk`."""
    flops: tuple[Item, ...]
    """Alignment, floating-point operations, without checkpointing."""
    here: TimeHere
    """The alignment on this machine."""
    plans: tuple[Plan, ...]
    """What is recommended on the GPUs asked for, with 16-bit weights."""
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, with the totals."""
        record = dataclasses.asdict(self)
        record["origin"] = "estimated"
        record["active_neuron_fraction"] = self.granularity.active_fraction
        record["active_parameter_fraction"] = self.counts.active_fraction
        record["efficiency"] = {
            "cpu": dataclasses.asdict(ON_CPU),
            "gpu": dataclasses.asdict(ON_GPU),
        }
        for plan, shown in zip(self.plans, record["plans"], strict=True):
            shown |= {"hours": plan.hours, "gpu_hours": plan.gpu_hours}
            for choice, written in zip(plan.choices, shown["choices"], strict=True):
                written |= {"memory_total": total(choice.memory), "step_s": choice.step_s}
        for name in _ITEMISED:
            record[f"{name}_total"] = total(getattr(self, name))
        return record


def inspect_model(
    config: Any,
    family: Family,
    experts: ExpertsConfig,
    run: RunSize,
    *,
    stored: torch.dtype,
    export_dtype: ExportDtype = "source",
    rates: DeviceRates | None = None,
    machines: Machines | None = None,
    finetune: FinetuneSize | None = None,
) -> Inspection:
    """Sizes, costs and warnings of converting one model.

    Args:
        config: Hugging Face config of the dense model.
        family: Its family.
        experts: Split that is wanted.
        run: Alignment run that is wanted.
        stored: Dtype of the dense checkpoint.
        export_dtype: Dtype wanted of the exported one.
        rates: Of this machine; None measures them (0.6 s).
        machines: GPUs to plan for, and what they are to do; None: the alignment, on each type.
        finetune: Size of the fine-tuning, if that is to be planned; None: the paper's.

    Raises:
        UserError: The split does not fit the FFN width, or the device is not there.
    """
    device = resolved_device(run.device)
    held = bytes_held(run.bytes_per_weight, device.type, stored)
    split = resolve(experts, config.intermediate_size)
    counts = count_parameters(config, family, split)
    sizes = sizes_of(
        config,
        family.traits(config),
        split,
        counts,
        stored=stored,
        written=written_dtype(stored, export_dtype),
        bytes_held=held,
    )
    seq_len = min(run.seq_len, sizes.widths.context)
    resolved = replace(run, bytes_per_weight=held, seq_len=seq_len, device=str(device))
    flops = alignment_flops(sizes, resolved)
    if rates is None:
        rates = measure_rates(device, torch.bfloat16 if held == 2 else torch.float32)
    return Inspection(
        model_type=config.model_type,
        layers=sizes.widths.layers,
        model_width=sizes.widths.model,
        ffn_width=sizes.widths.ffn,
        vocabulary=sizes.widths.vocabulary,
        context=sizes.widths.context,
        stored_dtype=dtype_name(stored),
        written_dtype=dtype_name(sizes.written),
        granularity=split,
        counts=counts,
        run=resolved,
        memory=alignment_memory(sizes, resolved, checkpointing=False),
        memory_checkpointing=alignment_memory(sizes, resolved, checkpointing=True),
        calibration_memory=calibration_memory(sizes, resolved),
        export_memory=export_memory(sizes),
        disk=disk(sizes, resolved),
        exported=exported_bytes(sizes),
        flops=flops,
        here=time_here(sizes, resolved, rates),
        plans=_planned(sizes, resolved, machines or Machines(), finetune or FinetuneSize()),
        warnings=warnings_for(sizes, run, export_dtype),
    )


def _planned(
    sizes: Sizes, run: RunSize, machines: Machines, finetune: FinetuneSize
) -> tuple[Plan, ...]:
    """Plans for the task; of fine-tuning, the run has its own batch and length."""
    if machines.task == "align":
        return plans(sizes, run, machines, Alignment()) if run.steps else ()
    batch = finetune.finetune_batch_size
    tuned = replace(
        run,
        batch_size=batch,
        micro_batch_size=1,
        steps=-(-finetune.finetune_tokens // (batch * run.seq_len)),
    )
    return plans(sizes, tuned, machines, Finetuning(size=finetune))
