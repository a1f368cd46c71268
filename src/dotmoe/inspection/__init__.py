"""What a conversion would give and cost, from the config alone: before anything is paid."""

from dataclasses import asdict, replace
from typing import Any

import torch

from dotmoe.calibrate import CalibrateConfig
from dotmoe.distributed import resolved_device
from dotmoe.errors import UserError
from dotmoe.finetuning.repair import RepairConfig
from dotmoe.granularity import splits_of
from dotmoe.inspection.memory import calibration_memory, disk, exported_bytes, repair_memory
from dotmoe.inspection.planner import (
    ACCELERATORS,
    Accelerator,
    measured_here,
    on_machine,
    plan,
    products,
    repair_flops,
)
from dotmoe.inspection.sizes import (
    EXPORTED,
    InspectConfig,
    Step,
    dtype_name,
    sizes_of,
    stored_dtype,
)
from dotmoe.inspection.tables import render
from dotmoe.inspection.warnings import warnings_for
from dotmoe.models.family import family_of
from dotmoe.options import check

__all__ = ["InspectConfig", "inspect_model", "render", "stored_dtype"]

RUN = ("steps", "batch_size", "micro_batch_size", "calibration_tokens")


def inspect_model(
    config: Any, asked: InspectConfig, *, stored: torch.dtype, here: Accelerator | None = None
) -> dict[str, Any]:
    """Sizes, costs and warnings of converting one model, as JSON values.

    Args:
        config: Hugging Face config of the dense model.
        asked: Split, run and machines.
        stored: Dtype of the dense checkpoint.
        here: This machine; None measures it (0.6 s, and as long in float32, if it is not that).

    Raises:
        UserError: The family is not supported, the split does not fit the model, a size is out of
            range, or the device is not there.
    """
    check(asked)
    device = resolved_device(asked.device)
    held = asked.bytes_per_weight or (4 if device.type == "cpu" or stored.itemsize > 2 else 2)
    if asked.export_dtype == "source":
        written = stored if stored in EXPORTED else torch.bfloat16
    else:
        written = getattr(torch, asked.export_dtype)
    split = splits_of(asked.experts, config.intermediate_size, config.num_attention_heads)
    if asked.task == "finetune" and asked.experts.targets != "ffn":
        raise UserError(
            f"task is finetune, but targets is {asked.experts.targets}: experts made of heads are "
            "repaired, not trained. Leave one of the two out."
        )
    sizes = sizes_of(config, family_of(config), split, stored=stored, written=written, held=held)
    widths, seq_len = sizes.widths, min(asked.seq_len, sizes.widths.context)
    calibrated = asked.calibration_tokens
    if calibrated is None:
        calibrated = CalibrateConfig().tokens(widths.model)
        asked = replace(asked, calibration_tokens=calibrated)
    if here is None:
        here = measured_here(device, torch.bfloat16 if held == 2 else torch.float32)
    in_float32 = here if here.dtype == "float32" else measured_here(device, torch.float32)
    step = Step(
        sizes=sizes,
        batch_size=asked.batch_size,
        seq_len=seq_len,
        micro_batch_size=asked.micro_batch_size,
        on_cpu=device.type == "cpu",
    )
    plain, again = (on_machine(replace(step, checkpointing=c), here) for c in (False, True))
    tokens, repair = asked.steps * asked.batch_size * seq_len, RepairConfig()
    repair_tokens = repair.tokens(split, config)
    repairing = repair_flops(sizes, repair_tokens, repair.repair_epochs)
    items = {
        "calibration_memory": calibration_memory(sizes, calibrated),
        "repair_memory": repair_memory(sizes, repair_tokens),
        "memory": plain["memory"],
        "memory_checkpointing": again["memory"],
        "disk": disk(sizes, tokens + calibrated),
        "exported": exported_bytes(sizes),
    }
    return {
        "origin": "estimated",
        "model_type": config.model_type,
        "widths": widths._asdict(),
        "stored_dtype": dtype_name(stored),
        "written_dtype": dtype_name(written),
        "granularity": asdict(split),
        "active_neuron_fraction": split.active_fraction,
        "counts": asdict(sizes.counts),
        "active_parameter_fraction": sizes.counts.active_fraction,
        "run": {name: getattr(asked, name) for name in RUN}
        | {
            "seq_len": seq_len,
            "tokens": tokens,
            "repair_tokens": repair_tokens,
            "bytes_per_weight": held,
            "device": str(device),
        },
        **items,
        **{f"{name}_total": sum(each.values()) for name, each in items.items()},
        "flops": asked.steps * sum(products(step).values()),
        "repair_flops": repairing,
        "here": asdict(here)
        | {
            "hours_repair": repairing
            / (in_float32.efficiency.products * in_float32.flops_per_s)
            / 3_600,
            "hours": asked.steps * plain["step_s"] / 3_600,
            "hours_checkpointing": asked.steps * again["step_s"] / 3_600,
        },
        "plans": _plans(step, asked, tokens),
        "warnings": warnings_for(sizes, asked, config.rope_parameters.get("rope_type", "default")),
    }


def _plans(step: Step, asked: InspectConfig, tokens: int) -> list[dict[str, Any]]:
    """For each GPU type and number that is asked for, with 16-bit weights."""
    step = replace(step, sizes=replace(step.sizes, held=2), on_cpu=False)
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
