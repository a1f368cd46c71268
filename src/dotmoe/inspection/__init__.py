"""What a conversion would give and cost, from the config alone: before anything is paid."""

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import torch

from dotmoe.distributed import resolved_device
from dotmoe.granularity import ExpertsConfig, Granularity, resolve
from dotmoe.inspection.memory import (
    alignment_memory,
    calibration_memory,
    disk,
    export_memory,
    exported_bytes,
)
from dotmoe.inspection.planner import Plan, plans
from dotmoe.inspection.sizes import (
    ExportDtype,
    FinetuneSize,
    Items,
    Machines,
    RunSize,
    Sizes,
    bytes_held,
    dtype_name,
    sizes_of,
    stored_dtype,
    written_dtype,
)
from dotmoe.inspection.step_time import (
    ON_CPU,
    ON_GPU,
    Accelerator,
    alignment_work,
    measured_here,
)
from dotmoe.inspection.tables import render
from dotmoe.inspection.warnings import warnings_for
from dotmoe.models.family import Family
from dotmoe.options import check
from dotmoe.parameters import ParameterCounts

__all__ = [
    "ExportDtype",
    "FinetuneSize",
    "Inspection",
    "Machines",
    "Plan",
    "RunSize",
    "inspect_model",
    "render",
    "stored_dtype",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeHere:
    """Estimated hours of the alignment on this machine, at the micro-batch that was asked for."""

    device: str
    dtype: str
    """Of the weights, and of the products whose rate it is."""
    flops_per_s: float
    bytes_per_s: float
    origin: str
    """Of the rates."""
    hours: float
    """Without activation checkpointing."""
    hours_checkpointing: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Everything that `dotmoe inspect` shows."""

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
    counts: ParameterCounts
    run: RunSize
    """As it would run: device and bytes per weight resolved, sequences within the context."""
    memory: Items
    """Alignment, bytes, without activation checkpointing."""
    memory_checkpointing: Items
    """Alignment, bytes, with activation checkpointing."""
    calibration_memory: Items
    """Start from data, bytes; before alignment, not on top of it."""
    export_memory: Items
    """Export and its verification, bytes."""
    disk: Items
    """Bytes."""
    exported: Items
    """The exported checkpoint, bytes; part of `disk`."""
    flops: int
    """Of the alignment, without checkpointing."""
    here: TimeHere
    """The alignment on this machine."""
    plans: tuple[Plan, ...]
    """What is recommended on the GPUs asked for, with 16-bit weights."""
    warnings: tuple[str, ...]

    @property
    def itemised(self) -> dict[str, Items]:
        """What the sizes are sums of, by what they are of."""
        return {
            "memory of the start from data": self.calibration_memory,
            "memory of the alignment": self.memory,
            "memory of the alignment, checkpointing": self.memory_checkpointing,
            "memory of the export": self.export_memory,
            "disk": self.disk,
            "exported checkpoint": self.exported,
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, with the totals."""
        record = dataclasses.asdict(self)
        record["origin"] = "estimated"
        record["active_neuron_fraction"] = self.granularity.active_fraction
        record["active_parameter_fraction"] = self.counts.active_fraction
        devices = {"cpu": ON_CPU, "gpu": ON_GPU}
        record["efficiency"] = {name: dataclasses.asdict(each) for name, each in devices.items()}
        for plan, shown in zip(self.plans, record["plans"], strict=True):
            shown |= {"hours": plan.hours, "gpu_hours": plan.gpu_hours}
            for choice, written in zip(plan.choices, shown["choices"], strict=True):
                total = sum(choice.memory.values())
                written |= {"memory_total": total, "step_s": choice.step_s}
        for field in dataclasses.fields(self):
            if isinstance(items := getattr(self, field.name), dict):
                record[f"{field.name}_total"] = sum(items.values())
        return record


def inspect_model(
    config: Any,
    family: Family,
    experts: ExpertsConfig,
    run: RunSize,
    *,
    stored: torch.dtype,
    export_dtype: ExportDtype = "source",
    here: Accelerator | None = None,
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
        here: This machine; None measures it (0.6 s).
        machines: GPUs to plan for, and what they are to do; None: the alignment, on each type.
        finetune: Size of the fine-tuning, if that is to be planned; None: the paper's.

    Raises:
        UserError: The split does not fit the model, a size is out of range, or the device is not
            there.
    """
    machines, finetune = machines or Machines(), finetune or FinetuneSize()
    for asked in (run, machines, finetune):
        check(asked)
    device = resolved_device(run.device)
    held = bytes_held(run.bytes_per_weight, device.type, stored)
    split = resolve(experts, config.intermediate_size)
    written = written_dtype(stored, export_dtype)
    sizes = sizes_of(config, family, split, stored=stored, written=written, held=held)
    seq_len = min(run.seq_len, sizes.widths.context)
    settled = replace(run, bytes_per_weight=held, seq_len=seq_len, device=str(device))
    if here is None:
        here = measured_here(device, torch.bfloat16 if held == 2 else torch.float32)
    work, again = (alignment_work(sizes, settled, checkpointing=flag) for flag in (False, True))
    hours = [
        settled.steps * sum(map(here.seconds, parts.values())) / 3_600 for parts in (work, again)
    ]
    return Inspection(
        model_type=config.model_type,
        layers=sizes.widths.layers,
        model_width=sizes.widths.model,
        ffn_width=sizes.widths.ffn,
        vocabulary=sizes.widths.vocabulary,
        context=sizes.widths.context,
        stored_dtype=dtype_name(stored),
        written_dtype=dtype_name(written),
        granularity=split,
        counts=sizes.counts,
        run=settled,
        memory=alignment_memory(sizes, settled, checkpointing=False),
        memory_checkpointing=alignment_memory(sizes, settled, checkpointing=True),
        calibration_memory=calibration_memory(sizes, settled),
        export_memory=export_memory(sizes),
        disk=disk(sizes, settled),
        exported=exported_bytes(sizes),
        flops=settled.steps * sum(part.products for part in work.values()),
        here=TimeHere(
            device=here.name,
            dtype=here.dtype,
            flops_per_s=here.flops_per_s,
            bytes_per_s=here.bytes_per_s,
            origin=here.origin,
            hours=hours[0],
            hours_checkpointing=hours[1],
        ),
        plans=_planned(sizes, settled, machines, finetune),
        warnings=warnings_for(sizes, run, export_dtype),
    )


def _planned(
    sizes: Sizes, run: RunSize, machines: Machines, finetune: FinetuneSize
) -> tuple[Plan, ...]:
    """Plans for the task; of fine-tuning, the run has its own batch and length."""
    if machines.task == "align":
        return plans(sizes, run, machines) if run.steps else ()
    batch = finetune.finetune_batch_size
    steps = -(-finetune.finetune_tokens // (batch * run.seq_len))
    tuned = replace(run, batch_size=batch, micro_batch_size=1, steps=steps)
    return plans(sizes, tuned, machines, finetune)
