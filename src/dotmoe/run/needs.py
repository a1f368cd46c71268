"""Options of runs that have an effect only together with others, one table for each command."""

from dataclasses import fields
from typing import Any

from dotmoe.common.options import Need
from dotmoe.export.config import GGUF_DENSE, GGUF_NAMES
from dotmoe.method.config import AlignConfig, AssignmentConfig
from dotmoe.text.config import asks

_OF_ALIGNMENT = tuple(field.name for field in fields(AlignConfig) if field.name != "steps")
_OF_NEURONS = ("expert_size", "experts", "active", "active_experts")
_OF_REPAIR = ("repair_tokens", "repair_epochs")
_TRAINED = "disp_llm"
"""The pruning method that takes steps."""


def _trains(run: Any) -> bool:
    """Whether a conversion takes steps: of the alignment, or of the router of another method."""
    steps = run.align.steps if run.method == "dot_moe" else run.baseline.router_steps
    return bool(steps > 0)


def _calibrates(run: Any) -> bool:
    return bool(run.method != "dot_moe" or run.calibrate.start == "data")


def _aligns(run: Any) -> bool:
    return bool(run.method == "dot_moe" and run.align.steps > 0)


def _cools(run: Any) -> bool:
    """Whether a conversion reads the last temperature: a random start is rounded at it."""
    return bool(
        run.method == "dot_moe" and (run.align.steps > 0 or run.calibrate.start == "random")
    )


def _draws_text(run: Any) -> bool:
    """Whether a text is shuffled or drawn; where none is named, the model may write it."""
    sources = run.data.data
    if run.answers.heldout_answers or run.data.shuffle_buffer or not sources:
        return True
    return any("dolmino" in each or asks(each) for each in sources)


def _compares(*methods: str) -> Any:
    """A condition: a comparison has one of these methods."""
    return lambda run: "all" in run.methods or any(name in run.methods for name in methods)


_OF_TEXT = (Need(("data_seed",), "own answers or --shuffle-buffer", _draws_text),)
_OF_EXPERTS = (
    Need(_OF_NEURONS, "--targets ffn or both", lambda run: run.experts.targets != "attention"),
    Need(_OF_REPAIR, "--repair", lambda run: run.repair),
    *_OF_TEXT,
)

CONVERT = (
    Need(("lte_steps",), "--method lte", lambda run: run.method == "lte"),
    Need(("keep",), "--method dot_moe", lambda run: run.method == "dot_moe"),
    Need(("keep",), "--start data", lambda run: run.calibrate.start == "data"),
    Need(("keep",), "--targets ffn", lambda run: run.experts.targets == "ffn"),
    Need(
        ("time",),
        "a share, not with --keep",
        lambda run: run.experts.keep is None,
        "{option} is {value}, but --keep {config.experts.keep} tries several shares, whose time is "
        "not known before. Give --active instead",
    ),
    Need(
        ("split_router", "router_steps"),
        "a --method other than dot_moe",
        lambda run: run.method not in ("dot_moe", "static_pruning"),
        "{option} is {value}, but --method {config.method} has no such router. Choose another",
    ),
    Need(
        ("steps",),
        "--method dot_moe",
        lambda run: run.method == "dot_moe" or run.align.steps == 0,
        "{option} is {value}, but it is for {needs} alone; {config.method} trains its router for "
        "--router-steps. Give those",
    ),
    Need(("learn_assignment", "start"), "--method dot_moe", lambda run: run.method == "dot_moe"),
    Need(("calibration_tokens", "ridge"), "--start data", _calibrates),
    Need(("solver",), "--method dot_moe", lambda run: run.method == "dot_moe"),
    Need(("tau_start",), "--steps", _aligns, unless="steps"),
    Need(("tau_end",), "--steps or --start random", _cools, unless="steps"),
    Need(
        _OF_ALIGNMENT,
        "--steps",
        _trains,
        "{option} is an option of the alignment, which is off. Give --steps (of another method: "
        "--router-steps) as well, or finetune the converted model with dotmoe finetune",
        unless="steps",
    ),
    Need(("checkpoint_every",), "--steps", _trains, unless="steps"),
    *_OF_EXPERTS,
)
"""Of `dotmoe convert`."""

_KEEPS_NOTHING = Need(
    ("keep",),
    "dotmoe convert",
    lambda run: run.experts.keep is None,
    "{option} is {value}, but only dotmoe convert measures what a share keeps. Give --active",
)

INSPECT = (
    _KEEPS_NOTHING,
    *CONVERT,
    Need(
        ("train", "finetune_recipe", "finetune_steps"),
        "--targets ffn",
        lambda run: run.experts.targets == "ffn",
    ),
)
"""Of `dotmoe inspect`."""

_OF_CONVERSIONS = (
    *("repair", *_OF_REPAIR, "time", "checkpoint_every"),
    *("lte_steps", "split_router", "router_steps", "start", "ridge"),
    *(field.name for field in fields(AssignmentConfig)),
    *(name for name in _OF_ALIGNMENT if name != "batch_size"),
)

PRUNE = (
    _KEEPS_NOTHING,
    Need(
        _OF_CONVERSIONS,
        "dotmoe convert",
        lambda run: False,
        "{option} is {value}, but pruning has no such step: it is for {needs} alone. Use that",
    ),
    Need(
        ("steps", "batch_size"),
        "disp_llm, which is trained,",
        lambda run: run.method == _TRAINED,
        "{option} is {value}, but it is for {needs} alone. Choose that method",
    ),
    Need(
        (*_OF_NEURONS, "shared", "first_dense_layers", "targets"),
        "a method that can choose its share",
        lambda run: not run.method.endswith("_2_4"),
        "{option} is {value}, but {config.method} zeroes two of four weights. Choose another",
    ),
    *_OF_TEXT,
)
"""Of `dotmoe.prune`."""

COMPARE = (
    _KEEPS_NOTHING,
    Need(("lte_steps",), "lte among --methods", _compares("lte")),
    Need(("mask_steps",), "disp_llm among --methods", _compares("disp_llm")),
    Need(("start",), "dot_moe among --methods", _compares("dot_moe")),
    Need(
        ("split_router",),
        "dotmoe convert",
        lambda run: False,
        "{option} is {value}, but a comparison measures both routers. Choose --methods",
    ),
    Need(
        ("steps",),
        "dotmoe convert",
        lambda run: run.align.steps == 0,
        "{option} is {value}, but a comparison trains each method for --router-steps. Give those",
    ),
    Need(
        ("learn_assignment",),
        "dotmoe convert",
        lambda run: False,
        "{option} is {value}, but with --router-steps a comparison trains with and without it. "
        "Give --router-steps",
    ),
    Need(
        tuple(name for name in _OF_ALIGNMENT if name not in ("learn_assignment", "batch_size")),
        "--router-steps",
        lambda run: run.baseline.router_steps > 0,
    ),
    Need(
        ("batch_size",),
        "--router-steps, or disp_llm among --methods",
        lambda run: run.baseline.router_steps > 0 or _compares("disp_llm")(run),
    ),
    Need(("finetune_recipe",), "--finetune-steps", lambda run: run.finetune_steps > 0),
    Need(("seed",), "a comparison without --seeds", lambda run: not run.seeds),
    *_OF_EXPERTS,
)
"""Of `dotmoe compare`, whose options serve several methods."""

FINETUNE = (
    Need(("lora_rank",), "--train lora", lambda run: run.finetune.train == "lora"),
    Need(("eval_tokens",), "--eval-text", lambda run: bool(run.eval_text)),
    Need(
        ("reuse_answers",),
        "the text of RUN",
        lambda run: not run.data.data,
        "{option} is {value}, but --data names another text than that of RUN. Give one of them",
    ),
    *_OF_TEXT,
)
"""Of `dotmoe finetune`."""


def _exports_gguf(run: Any) -> bool:
    return run.export.format in GGUF_NAMES


_NOT_OF_THIS_FORMAT = "{option} does not apply to format {config.export.format}. Name another one"
EXPORT = (
    Need(("gguf_type", "gguf_tokenizer"), "--format gguf", _exports_gguf, _NOT_OF_THIS_FORMAT),
    Need(
        ("export_dtype", "max_shard_gib"),
        "a --format other than gguf",
        lambda run: not _exports_gguf(run),
        _NOT_OF_THIS_FORMAT,
    ),
    Need(
        ("active_experts",),
        "a --format of an MoE",
        lambda run: run.export.format != GGUF_DENSE,
        _NOT_OF_THIS_FORMAT,
    ),
)
"""Of `dotmoe export`."""
