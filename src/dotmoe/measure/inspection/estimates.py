"""Estimates of what a conversion would give and cost, from the config alone."""

import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from dotmoe.common.device import resolved_device
from dotmoe.common.distributed import num_ranks
from dotmoe.common.errors import UserError
from dotmoe.common.options import check
from dotmoe.common.tables import in_time
from dotmoe.export.architectures import FORMATS
from dotmoe.export.choice import ALL_RUN, NEEDS_OWN_CODE, OWN, context_note, format_for
from dotmoe.export.format import EXPORTED
from dotmoe.export.gguf_limits import room_in_llama_cpp
from dotmoe.export.transformers_format import TransformersFormat, server_faults
from dotmoe.measure.config import InspectConfig
from dotmoe.measure.inspection.accelerators import ACCELERATORS, Accelerator, measured_here
from dotmoe.measure.inspection.planned_stages import (
    SPLIT_LEFT_OUT,
    UNMEASURED,
    WRITING_ASSUMED,
    Stages,
)
from dotmoe.measure.inspection.planner import plan_step
from dotmoe.measure.inspection.sizes import Sizes, Step, exported_bytes
from dotmoe.method.config import RepairConfig
from dotmoe.method.dense_layers import LAYERS_PER_DENSE
from dotmoe.method.granularity import Granularity, fitting_sizes, to_record
from dotmoe.models.chat import states_chats
from dotmoe.models.checkpoint import Tensors, dtype_name, require_checkpoint
from dotmoe.models.config import is_gguf
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.family import family_of
from dotmoe.models.load import resolved_dtype
from dotmoe.models.meta_model import meta_model
from dotmoe.models.read_config import dense_config
from dotmoe.run.config import RunConfig
from dotmoe.run.defaults import splits_for, with_defaults, with_sources
from dotmoe.text.questions import asks_by_name
from dotmoe.text.tokenise import require_sources

AnyConversion = TypeVar("AnyConversion", bound=RunConfig)
_ALIGNED = 64
"""Expert sizes that are multiples of it suit kernels of GPUs, and llama.cpp's quantisation."""
_HOURS = {"s": 1 / 3_600, "m": 1 / 60, "h": 1.0, "d": 24.0}
"""Hours of the units of a duration."""


class _Sized(NamedTuple, Generic[AnyConversion]):
    """A conversion with the options settled, and the sizes of its model."""

    options: AnyConversion
    """The options as `convert` settles them."""
    dense: DenseModel
    """The described model, without weights."""
    sizes: Sizes
    form: TransformersFormat | None
    """The format of the export; None if no format can hold it."""
    refusal: str = ""
    """Why no format can hold it."""


def plan_of(config: InspectConfig) -> dict[str, Any]:
    """The plan of a conversion of the model that the config names, see `inspect_model`.

    Raises a `UserError` also for sources of text that do not exist, though their text is not read.
    """
    stock_config, folder = dense_config(config.model)
    stored = stored_dtype(stock_config, folder)
    is_chat = states_chats(folder)
    require_sources(with_sources(config, is_chat=is_chat).data, config.eval_text)
    plan = inspect_model(stock_config, config, stored=stored, is_chat=is_chat)
    return {"model": config.model, **plan}


def inspect_model(
    stock_config: Any,
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
    sized = _sized(stock_config, with_sources(options, is_chat=is_chat), stored)
    options, sizes = sized.options, sized.sizes
    machines = _quoted_machines(options, stored)
    if not options.gpu:
        machines.insert(0, here or _measured(device, options, stored))
    chosen = list[str]()
    if options.time:
        options, why = chosen_in_time(options, machines[0])
        chosen.append(why)
    stages = Stages(sizes, options, is_chat=is_chat)
    if stages.compares_layers:
        most = sizes.widths.layers // LAYERS_PER_DENSE
        chosen.append(f"up to {most} leading layers stay dense, which it measures on the text")
    trainings = stages.trainings()
    plans = [_plans_on(machine, trainings) for machine in machines]
    conversions = [
        stages.on(machine, plan.get("align")) for machine, plan in zip(machines, plans, strict=True)
    ]
    return {
        "origin": "estimated",
        "model_type": stock_config.model_type,
        "widths": sizes.widths._asdict(),
        "stored_dtype": dtype_name(stored),
        "written_dtype": dtype_name(sizes.written),
        "granularity": to_record(sizes.splits),
        "counts": asdict(sizes.counts),
        "run": {**_run_of(stages, options), "device": str(device)},
        **_items_on_disk(sizes, conversions[0]),
        "conversions": conversions,
        "choices": _choices(stages, options, machines[0], plans[0]),
        "plans": [plan for on_machine in plans for plan in on_machine.values()],
        "chosen": chosen,
        "unmeasured": _unmeasured(options, stages),
        "warnings": _warnings(sized),
        "limits": _limits(sized),
    }


def _plans_on(
    machine: Accelerator, trainings: Mapping[str, tuple[Step, int]]
) -> dict[str, dict[str, Any]]:
    """The plan of each training on one machine, by task."""
    return {
        task: {"task": task, **plan_step(step, machine, tokens=tokens)}
        for task, (step, tokens) in trainings.items()
    }


def _run_of(stages: Stages, options: InspectConfig) -> dict[str, Any]:
    """What a run would read, write and train on, in tokens."""
    trainings = stages.trainings()
    shows_finetuning = options.finetune_recipe or options.finetune_steps or options.train
    return {
        "shown": [task for task in trainings if task == "align" or shows_finetuning],
        "tokens": {task: tokens for task, (_, tokens) in trainings.items()},
        "text_tokens": stages.text_tokens,
        "writing": [{"tokens": each.tokens, **asdict(each)} for each in stages.writing],
        "calibration_tokens": stages.calibration_tokens,
        "repair_tokens": stages.repair_tokens,
        "repair_epochs": options.repairing.repair_epochs,
    }


def _items_on_disk(sizes: Sizes, conversion: dict[str, Any]) -> dict[str, Any]:
    """Bytes by item that a conversion needs on disk, and those of the export; and both totals."""
    dense_bytes = sizes.stored.itemsize * sizes.counts.dense_total
    disk = {"dense checkpoint (unless it is there)": dense_bytes}
    disk |= {row["stage"]: row["disk"] for row in conversion["stages"] if row["disk"]}
    exported = exported_bytes(sizes)
    return {
        "disk": disk,
        "exported": exported,
        "disk_total": sum(disk.values()),
        "exported_total": sum(exported.values()),
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


def _choices(
    stages: Stages,
    options: InspectConfig,
    machine: Accelerator,
    plans: Mapping[str, dict[str, Any]],
) -> list[dict[str, Any]]:
    """Commands to choose from on a machine, with hours: a conversion by each repair, a finetuning.

    `plans` are those of the trainings on the machine. The hours of a finetuning are those of its
    training and of the answers that the model writes for it. Empty if nothing is to be repaired.
    """
    if not options.repair:
        return []
    align = plans.get("align")
    choices = [
        {"command": f"convert MODEL OUT {name}", "hours": choice.on(machine, align)["hours"]}
        for name, choice in stages.repaired()
    ]
    if "finetune" in plans:
        hours = plans["finetune"]["hours"]
        if hours is not None:
            hours += stages.hours_of_writing_to_finetune(machine)
        choices.append({"command": _finetune_command(options, stages), "hours": hours})
    return choices


def _finetune_command(options: InspectConfig, stages: Stages) -> str:
    """The finetuning that is planned, with the options that are given or needed for it."""
    given = {
        "recipe": options.finetune_recipe,
        "train": options.train,
        "steps": options.finetune_steps,
    }
    words = [f"--{name} {value}" for name, value in given.items() if value]
    if asks_by_name(options.data) and not stages.finetuning_writes():
        words.append("--data FILE")
    return " ".join(["finetune OUT OUT2", *words])


def _unmeasured(options: InspectConfig, stages: Stages) -> list[str]:
    """What the estimates do not rest on measurements of."""
    sentences = list(UNMEASURED)
    if stages.writing:
        sentences.append(WRITING_ASSUMED)
    if options.method != "dot_moe":
        sentences.append(SPLIT_LEFT_OUT)
    return sentences


def _limits(sized: _Sized[InspectConfig]) -> list[str]:
    """What servers of the exported format cannot do."""
    form, sizes = sized.form, sized.sizes
    if form is None or "vLLM" not in form.servers:
        return []
    return server_faults(form.config(sized.dense, sizes.split, dtype_name(sizes.written)))


def chosen_in_time(
    config: AnyConversion, here: Accelerator | None = None
) -> tuple[AnyConversion, str]:
    """The config with the repair that loses least and fits into `config.time` here, and why.

    Raises a `UserError` if `time` is no duration, none fits, or the repair is given as well.
    """
    allowed_hours = _hours_allowed(config)
    stock_config, folder = dense_config(config.model)
    stored = stored_dtype(stock_config, folder)
    device = resolved_device(config.load.device)
    is_chat = states_chats(folder)
    sized = _sized(stock_config, with_sources(config, is_chat=is_chat), stored)
    here = here or replace(_measured(device, config, stored), gpus=num_ranks())
    stages = Stages(sized.sizes, sized.options, is_chat=is_chat)
    align = _plans_on(here, stages.trainings()).get("align")
    if align is not None and align["hours"] is None:
        raise UserError(
            f"time is {config.time}, but the alignment does not fit into memory here, so its time "
            "is not known. Leave time out, or set steps to 0."
        )
    estimates = list[str]()
    for name, choice in stages.repaired():
        hours = choice.on(here, align)["hours"]
        estimates.append(f"{name or 'the default repair'} about {in_time(hours)}")
        if hours <= allowed_hours:
            text = f"time {config.time}: takes {', not '.join(reversed(estimates))}, by estimate"
            return replace(config, repairing=choice.config.repairing), text
    raise UserError(
        f"time is {config.time}, but no repair takes less here: {', '.join(estimates)}. Raise "
        "time, or give --no-repair."
    )


def _hours_allowed(config: RunConfig) -> float:
    """Hours of `config.time`; raises a `UserError` as `chosen_in_time` does."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", config.time or "")
    if not match:
        raise UserError(f"time is {config.time!r}, but it must be a duration, as 30m, 2h or 1d.")
    if not config.repair or config.repairing != RepairConfig():
        raise UserError(
            f"time is {config.time}, which chooses the repair, but options of a repair are given "
            "as well. Leave one of the two out."
        )
    number, unit = match.groups()
    return float(number) * _HOURS[unit]


def _sized(stock_config: Any, options: AnyConversion, stored: torch.dtype) -> _Sized[AnyConversion]:
    """Settle the options for a model of a Hugging Face config, stored in a dtype, and size it.

    Raises a `UserError` if no layer is split.
    """
    written = EXPORTED.get(stored, torch.bfloat16)
    if options.export.export_dtype != "source":
        written = getattr(torch, options.export.export_dtype)
    model = meta_model(stock_config)
    family = family_of(stock_config)
    dense = DenseModel(model=model, weights="meta", family=family, source=options.model)
    options = with_defaults(options, dense, written)
    splits = splits_for(options.method, options, dense, written)
    sizes = Sizes(model, splits, stored=stored, written=written)
    try:
        form = FORMATS[format_for(dense, splits, options.export.format, written).name]
    except UserError as error:
        if splits[0].first_dense_layers >= dense.widths.layers:
            raise
        return _Sized(options, dense, sizes, form=None, refusal=str(error))
    return _Sized(options, dense, sizes, form)


def _measured(device: torch.device, options: RunConfig, stored: torch.dtype) -> Accelerator:
    """This machine, in the dtype that a conversion computes in."""
    dtype = resolved_dtype(options.load.dtype, device)
    if dtype == "auto":
        dtype = torch.bfloat16 if stored.itemsize == 2 else torch.float32
    return measured_here(device, dtype)


def stored_dtype(stock_config: Any, folder: Path) -> torch.dtype:
    """Dtype of the FFN weights in a checkpoint, else the config's, else bfloat16.

    Raises a `UserError` for tensors that are not those of the config's model, and for pickles.
    """
    if not any(each.suffix == ".safetensors" or is_gguf(each) for each in folder.iterdir()):
        if any(each.suffix in (".bin", ".pt", ".pth") for each in folder.iterdir()):
            require_checkpoint(folder)
        dtype = getattr(stock_config, "dtype", None) or torch.bfloat16
        return getattr(torch, dtype) if isinstance(dtype, str) else dtype
    model = meta_model(stock_config)
    family = family_of(stock_config)
    dense = DenseModel(
        model=model, weights="meta", family=family, folder=folder, source=str(folder)
    )
    tensors = Tensors.of(dense)
    tensors.require_model(model)
    return tensors.dtype


def _warnings(sized: _Sized[InspectConfig]) -> list[str]:
    """Warnings about one conversion; what the export would refuse comes first."""
    sizes = sized.sizes
    size = sizes.split.expert_size
    sentences = [
        *_warnings_of_dtype(sized.options, sizes),
        *_warnings_of_format(sized),
        *_warnings_of_llama_cpp(sized),
    ]
    if sizes.split.active_fraction == 1:
        sentences.append(ALL_RUN)
    if sizes.split.target == "ffn" and size % _ALIGNED > 0:
        sentences.append(
            f"Experts have {size} neurons, not a multiple of {_ALIGNED}: GPU kernels pad or slow "
            "down, and llama.cpp quantises down_proj in multiples of 32 only."
        )
    if sized.form is not None:
        lowered = context_note(sized.dense, sizes.splits, sized.form, sizes.written)
        if lowered:
            sentences.append(lowered)
    return sentences


def _warnings_of_dtype(options: InspectConfig, sizes: Sizes) -> list[str]:
    """Warnings about a stored dtype that the export refuses or changes."""
    sentences = list[str]()
    if options.export.export_dtype != "source":
        return sentences
    if sizes.stored not in EXPORTED:
        sentences.append(
            f"Export refuses weights stored as {dtype_name(sizes.stored)}. Give --export-dtype "
            "bfloat16 (rounds the weights; assumed here) or float32 (twice the size)."
        )
    if sizes.stored == torch.float16:
        sentences.append(
            "float16 weights are exported as float32 (exact, twice the size), because float16 "
            "cannot hold the scaled routers; --export-dtype bfloat16 rounds the weights."
        )
    return sentences


def _warnings_of_format(sized: _Sized[InspectConfig]) -> list[str]:
    """Warnings about a conversion that no format can hold, or only one that has code of its own."""
    if sized.form is None:
        return [f"Export refuses this: {sized.refusal}"]
    if sized.form.name == OWN:
        return [NEEDS_OWN_CODE]
    return []


def _warnings_of_llama_cpp(sized: _Sized[InspectConfig]) -> list[str]:
    """Warnings about a conversion that no GGUF can hold, though it could hold other experts."""
    splits = sized.sizes.splits
    split = splits[0]
    active = split.active_experts
    most = room_in_llama_cpp(sized.dense, splits)
    if 0 < most < active:
        return [
            f"{active} experts run per token; llama.cpp runs at most {most} of this model, so a "
            "GGUF of it is refused. With larger experts fewer run."
        ]
    has_own_code = sized.form is not None and sized.form.name == OWN
    if most != 0 or has_own_code:
        return []
    plain = replace(split, shared_size=0, first_dense_layers=0)
    most = room_in_llama_cpp(sized.dense, (plain, *splits[1:]))
    if most <= 0:
        return []
    options = "--shared 0 --first-dense-layers 0"
    if size := _size_for_llama_cpp(split, most):
        options += f" --expert-size {size}"
    return [
        "No GGUF format holds this model with a shared expert or leading dense layers. For "
        f"llama.cpp give {options}."
    ]


def _size_for_llama_cpp(split: Granularity, most: int) -> int | None:
    """The smallest expert size at which the same share is at most so many experts, none shared.

    None if the own size is such a one, or no size is.
    """
    active = split.active_fraction * split.units
    if round(active / split.expert_size) <= most:
        return None
    sizes = [size for size in fitting_sizes(split.units) if size % _ALIGNED == 0]
    return next((size for size in sizes if round(active / size) <= most), None)
