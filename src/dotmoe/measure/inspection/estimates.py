"""Estimates of what a conversion would give and cost, from the config alone."""

import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from dotmoe.common.distributed import num_ranks, resolved_device
from dotmoe.common.errors import UserError
from dotmoe.common.options import check
from dotmoe.common.tables import in_time
from dotmoe.export.architectures import FORMATS
from dotmoe.export.choice import NEEDS_OWN_CODE, OWN, context_note, format_for
from dotmoe.export.format import EXPORTED
from dotmoe.export.gguf_limits import room_in_llama_cpp
from dotmoe.export.transformers_format import TransformersFormat, limits_met
from dotmoe.measure.config import InspectConfig
from dotmoe.measure.inspection.planner import (
    ACCELERATORS,
    Accelerator,
    measured_here,
    plan_step,
)
from dotmoe.measure.inspection.sizes import Sizes, exported_bytes
from dotmoe.measure.inspection.stages import (
    SPLIT_LEFT_OUT,
    UNMEASURED,
    WRITING_ASSUMED,
    Stages,
)
from dotmoe.method.calibrate import LAYERS_PER_DENSE
from dotmoe.method.config import RepairConfig
from dotmoe.method.granularity import Splits, to_record
from dotmoe.models.chat import states_chats
from dotmoe.models.checkpoint import Tensors, dtype_name, is_gguf, require_checkpoint
from dotmoe.models.family import DenseModel, family_of, meta_model
from dotmoe.models.load import dense_config, resolved_dtype
from dotmoe.run.config import RunConfig
from dotmoe.run.defaults import splits_for, with_defaults, with_sources
from dotmoe.text.tokenise import require_sources

AnyConversion = TypeVar("AnyConversion", bound=RunConfig)
_HOURS = {"s": 1 / 3_600, "m": 1 / 60, "h": 1.0, "d": 24.0}


def plan_of(config: InspectConfig) -> dict[str, Any]:
    """The plan of a conversion of the model that the config names, see `inspect_model`.

    Raises a `UserError` also for sources of text that do not exist, though their text is not read.
    """
    dense, folder = dense_config(config.model)
    stored, is_chat = stored_dtype(dense, folder), states_chats(folder)
    require_sources(with_sources(config, is_chat=is_chat).data, config.eval_text)
    plan = inspect_model(dense, config, stored=stored, is_chat=is_chat)
    return {"model": config.model, **plan}


def inspect_model(
    config: Any,
    options: InspectConfig,
    *,
    stored: torch.dtype,
    is_chat: bool = False,
    here: Accelerator | None = None,
) -> dict[str, Any]:
    """Sizes, costs and warnings of converting a model of this Hugging Face config, as JSON values.

    `stored` is the dtype of its checkpoint, `is_chat` whether it has a chat template. `here` is
    this machine; None measures it, in about a second, unless a GPU is named. Raises a `UserError`
    if the family is not supported, the split does not fit the model, a size is out of range, or the
    device is absent.
    """
    check(options)
    device = resolved_device(options.load.device)
    options = with_sources(options, is_chat=is_chat)
    options, dense, sizes, form = _sized(config, options, stored)
    is_asked = options.finetune_recipe or options.finetune_steps or options.train
    machines = _quoted_machines(options, stored)
    if not options.gpu:
        machines.insert(0, here or _measured(device, options, stored))
    chosen = list[str]()
    if options.time:
        options, why = chosen_in_time(options, machines[0])
        chosen.append(why)
    stages = Stages(sizes, options, is_chat=is_chat)
    trainings = stages.trainings()
    if stages.compares_layers:
        most = sizes.widths.layers // LAYERS_PER_DENSE
        chosen.append(f"up to {most} leading layers stay dense, which it measures on the text")
    plans, conversions = list[dict[str, Any]](), list[dict[str, Any]]()
    choices = list[dict[str, Any]]()
    for machine in machines:
        made = {
            task: {"task": task, **plan_step(step, machine, tokens=tokens)}
            for task, (step, tokens) in trainings.items()
        }
        plans += made.values()
        align = made.get("align")
        conversions.append(stages.on(machine, align))
        if not choices and options.repair:  # on the first machine
            choices = _repair_choices(stages, machine, align)
            if "finetune" in made:
                hours = made["finetune"]["hours"]
                choices.append({"command": _finetune_command(options), "hours": hours})
    written = {row["stage"]: row["disk"] for row in conversions[0]["stages"] if row["disk"]}
    there = {"dense checkpoint (unless it is there)": stored.itemsize * sizes.counts.dense_total}
    items = {"disk": there | written, "exported": exported_bytes(sizes)}
    return {
        "origin": "estimated",
        "model_type": config.model_type,
        "widths": sizes.widths._asdict(),
        "stored_dtype": dtype_name(stored),
        "written_dtype": dtype_name(sizes.written),
        "granularity": to_record(sizes.splits),
        "counts": asdict(sizes.counts),
        "run": {
            "shown": [task for task in trainings if task == "align" or is_asked],
            "tokens": {task: tokens for task, (_, tokens) in trainings.items()},
            "text_tokens": stages.text_tokens,
            "writing": [{"tokens": each.tokens, **asdict(each)} for each in stages.writing],
            "calibration_tokens": stages.calibration_tokens,
            "repair_tokens": stages.repair_tokens,
            "repair_epochs": options.repairing.repair_epochs,
            "device": str(device),
        },
        **items,
        **{f"{name}_total": sum(each.values()) for name, each in items.items()},
        "conversions": conversions,
        "choices": choices,
        "plans": plans,
        "chosen": chosen,
        "unmeasured": _unmeasured(options, stages),
        "warnings": _warnings(dense, sizes, options, form),
        "limits": _limits(dense, sizes, form),
    }


def _quoted_machines(options: InspectConfig, stored: torch.dtype) -> list[Accelerator]:
    """The GPUs to plan for, of the type and number that are asked for, or all known ones."""
    own = dtype_name(stored) if options.load.dtype == "auto" else options.load.dtype
    names = [options.gpu] if options.gpu else list(ACCELERATORS)
    counts = [options.gpus] if options.gpus else [1, 8]
    return [
        replace(ACCELERATORS[name].computing_in(own), gpus=gpus)
        for name in names
        for gpus in counts
    ]


def _repair_choices(
    stages: Stages, machine: Accelerator, align: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """Command and hours of a conversion with each repair to choose from."""
    return [
        {"command": f"convert MODEL OUT {name}", "hours": choice.on(machine, align)["hours"]}
        for name, choice in stages.repaired()
    ]


def _finetune_command(options: InspectConfig) -> str:
    """The finetuning that is planned, with the options that are given for it."""
    given = {
        "recipe": options.finetune_recipe,
        "train": options.train,
        "steps": options.finetune_steps,
    }
    words = [f"--{name} {value}" for name, value in given.items() if value]
    return " ".join(["finetune OUT OUT2", *words])


def _unmeasured(options: InspectConfig, stages: Stages) -> list[str]:
    """What the estimates do not rest on measurements of."""
    sentences = list(UNMEASURED)
    if stages.writing:
        sentences.append(WRITING_ASSUMED)
    if options.method != "dot_moe":
        sentences.append(SPLIT_LEFT_OUT)
    return sentences


def _limits(dense: DenseModel, sizes: Sizes, form: TransformersFormat | str) -> list[str]:
    """What servers of the exported format cannot do."""
    if isinstance(form, str) or "vLLM" not in form.servers:
        return []
    return limits_met(form.config(dense, sizes.split, dtype_name(sizes.written)))


def chosen_in_time(
    config: AnyConversion, here: Accelerator | None = None
) -> tuple[AnyConversion, str]:
    """The config with the repair that loses least and fits into `config.time` here, and why.

    Raises a `UserError` if `time` is no duration, none fits, or the repair is given as well.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", config.time or "")
    if not match:
        raise UserError(f"time is {config.time!r}, but it must be a duration, as 30m, 2h or 1d.")
    if not config.repair or config.repairing != RepairConfig():
        raise UserError(
            f"time is {config.time}, which chooses the repair, but options of a repair are given "
            "as well. Leave one of the two out."
        )
    model, folder = dense_config(config.model)
    stored, device = stored_dtype(model, folder), resolved_device(config.load.device)
    is_chat = states_chats(folder)
    meant, _, sizes, _ = _sized(model, with_sources(config, is_chat=is_chat), stored)
    here = here or replace(_measured(device, config, stored), gpus=num_ranks())
    stages, estimates = Stages(sizes, meant, is_chat=is_chat), list[str]()
    training = stages.trainings().get("align")
    align = None if training is None else plan_step(training[0], here, tokens=training[1])
    for name, choice in stages.repaired():
        hours = choice.on(here, align)["hours"] or math.inf
        estimates.append(f"{name or 'the default repair'} about {in_time(hours)}")
        if hours <= float(match[1]) * _HOURS[match[2]]:
            text = f"time {config.time}: takes {', not '.join(reversed(estimates))}, by estimate"
            return replace(config, repairing=choice.config.repairing), text
    raise UserError(
        f"time is {config.time}, but no repair takes less here: {', '.join(estimates)}. Raise "
        "time, or give --no-repair."
    )


def _sized(
    config: Any, options: AnyConversion, stored: torch.dtype
) -> tuple[AnyConversion, DenseModel, Sizes, TransformersFormat | str]:
    """The options as `convert` settles them, the described model, its sizes, and the format.

    Instead of the format, why none can hold this.
    """
    written = EXPORTED.get(stored, torch.bfloat16)
    if options.export.export_dtype != "source":
        written = getattr(torch, options.export.export_dtype)
    model, family = meta_model(config), family_of(config)
    dense = DenseModel(model=model, weights="meta", family=family, source=options.model)
    options = with_defaults(options, dense, written)
    splits = splits_for(options.method, options, dense, written)
    sizes = Sizes(model, splits, stored=stored, written=written)
    form = _format_or_refusal(dense, splits, options.export.format, written)
    return options, dense, sizes, form


def _measured(device: torch.device, options: RunConfig, stored: torch.dtype) -> Accelerator:
    """This machine, in the dtype that a conversion computes in."""
    dtype = resolved_dtype(options.load.dtype, device)
    if dtype == "auto":
        dtype = torch.bfloat16 if stored.itemsize == 2 else torch.float32
    return measured_here(device, dtype)


def stored_dtype(config: Any, folder: Path) -> torch.dtype:
    """Dtype of the FFN weights in a checkpoint, else the config's, else bfloat16.

    Raises a `UserError` for tensors that are not those of the config's model, and for pickles.
    """
    if not any(each.suffix == ".safetensors" or is_gguf(each) for each in folder.iterdir()):
        if any(each.suffix in (".bin", ".pt", ".pth") for each in folder.iterdir()):
            require_checkpoint(folder)
        dtype = getattr(config, "dtype", None) or torch.bfloat16
        return getattr(torch, dtype) if isinstance(dtype, str) else dtype
    model, family = meta_model(config), family_of(config)
    dense = DenseModel(
        model=model, weights="meta", family=family, folder=folder, source=str(folder)
    )
    tensors = Tensors.of(dense)
    tensors.require_model(model)
    return tensors.dtype


def _warnings(
    dense: DenseModel, sizes: Sizes, options: InspectConfig, form: TransformersFormat | str
) -> list[str]:
    """Warnings about one conversion; what the export would refuse comes first."""
    split = sizes.split
    of_neurons, served = split.target == "ffn", isinstance(form, str) or form.name != OWN
    size, active = split.expert_size, split.active_experts
    lowered = ""
    if not isinstance(form, str):
        lowered = context_note(dense, sizes.splits, form, sizes.written)
    most = room_in_llama_cpp(dense, sizes.splits)
    plain = replace(split, shared_size=0, first_dense_layers=0)
    plain_alone = most == 0 and room_in_llama_cpp(dense, (plain, *sizes.splits[1:])) > 0
    sentences = {
        f"Export refuses weights stored as {dtype_name(sizes.stored)}. Give --export-dtype "
        "bfloat16 (rounds the weights; assumed here) or float32 (twice the size).": (
            options.export.export_dtype == "source" and sizes.stored not in EXPORTED
        ),
        "float16 weights are exported as float32 (exact, twice the size), because float16 cannot "
        "hold the scaled routers; --export-dtype bfloat16 rounds the weights.": (
            options.export.export_dtype == "source" and sizes.stored == torch.float16
        ),
        f"Export refuses this: {form}": isinstance(form, str),
        NEEDS_OWN_CODE: not served,
        f"{active} experts run per token; llama.cpp runs at most {most} of this model, so a GGUF "
        "of it is refused. With larger experts fewer run.": 0 < most < active,
        "No GGUF format holds this model with a shared expert or leading dense layers. For "
        "llama.cpp give --shared 0 and --first-dense-layers 0.": served and plain_alone,
        f"Experts have {size} neurons, not a multiple of 64: GPU kernels pad or slow down, and "
        "llama.cpp quantises down_proj in multiples of 32 only.": of_neurons and size % 64 > 0,
        lowered: bool(lowered),
    }
    return [sentence for sentence, applies in sentences.items() if applies]


def _format_or_refusal(
    dense: DenseModel, splits: Splits, name: str, written: torch.dtype
) -> TransformersFormat | str:
    """The format of the export, or why none can hold this; raised if no layer is split."""
    try:
        return FORMATS[format_for(dense, splits, name, written).name]
    except UserError as error:
        if splits[0].first_dense_layers >= dense.widths.layers:
            raise
        return str(error)
