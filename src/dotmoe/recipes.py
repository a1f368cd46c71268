"""Named runs as functions; a variant is `replace()` on another recipe.

A recipe leaves `model` and `out` to the caller. Numbers at the paper's scale are the paper's;
`quickstart` is scaled down to minutes on two CPU cores.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dotmoe.align import AlignConfig
from dotmoe.calibrate import CalibrateConfig
from dotmoe.config import AnyRunConfig, FinetuneRunConfig, RunConfig
from dotmoe.data import DataConfig
from dotmoe.errors import UserError, nearest
from dotmoe.finetuning import FinetuneConfig
from dotmoe.granularity import ExpertsConfig
from dotmoe.moe.assignment import AssignmentConfig


def default() -> RunConfig:
    """The paper's hyperparameters with our start, router surrogate and solver."""
    return RunConfig(model="", out="")


def paper() -> RunConfig:
    """The paper to the letter: random start, softmax surrogate, 50 unrolled Sinkhorn sweeps.

    Its text is Dolmino-mix, streamed from the hub where no other `data` is given.
    """
    base = default()
    return replace(
        base,
        data=replace(base.data, data=("dolmino",)),
        calibrate=replace(base.calibrate, start="random"),
        assignment=AssignmentConfig(solver="sinkhorn", sinkhorn_sweeps=50),
        align=replace(base.align, surrogate="softmax"),
    )


def llama2_7b() -> RunConfig:
    """The paper's LLaMA-2-7B: E = 86, k = 22."""
    experts = ExpertsConfig(expert_size=128, active_experts=22)
    return replace(paper(), model="meta-llama/Llama-2-7b-hf", experts=experts)


def llama3_8b() -> RunConfig:
    """The paper's LLaMA-3-8B: E = 112, k = 28."""
    experts = ExpertsConfig(expert_size=128, active_experts=28)
    return replace(paper(), model="meta-llama/Meta-Llama-3-8B", experts=experts)


def qwen25_7b() -> RunConfig:
    """The paper's Qwen2.5-7B: E = 148, k = 37."""
    experts = ExpertsConfig(expert_size=128, active_experts=37)
    return replace(paper(), model="Qwen/Qwen2.5-7B", experts=experts)


def qwen25_7b_half_active() -> RunConfig:
    """The paper's Qwen2.5-7B at half the FFN active: E = 148, k = 74."""
    base = qwen25_7b()
    return replace(base, experts=replace(base.experts, active_experts=74))


def small() -> RunConfig:
    """For models of some million parameters: higher rates, small batches, a few hundred steps."""
    return replace(
        default(),
        data=DataConfig(seq_len=256),
        align=AlignConfig(steps=300, batch_size=4, lr=1e-2, lr_router=1e-2, max_epochs=100.0),
    )


def quickstart() -> RunConfig:
    """The bundled model on this machine's own standard library, in minutes on two CPU cores."""
    base = small()
    return replace(
        base,
        model="embedded",
        experts=ExpertsConfig(expert_size=16, active=0.25),
        data=replace(base.data, data=("python-stdlib",)),
        calibrate=CalibrateConfig(calibration_tokens=8192),
        eval_text=("python-stdlib-heldout",),
    )


def sft() -> FinetuneRunConfig:
    """Finetuning with the paper's settings (tab:hyperparams_sft): 1.2B tokens."""
    return FinetuneRunConfig(run="", out="")


def small_sft() -> FinetuneRunConfig:
    """Finetuning of models of some million parameters, in minutes on two CPU cores."""
    return replace(
        sft(),
        data=DataConfig(seq_len=256),
        finetune=FinetuneConfig(
            steps=150, batch_size=4, lr=1e-3, lr_router=3e-4, kl_weight=1.0, max_epochs=100.0
        ),
    )


RECIPES: dict[str, dict[str, Callable[[], AnyRunConfig]]] = {
    "convert": {
        "default": default,
        "paper": paper,
        "llama2_7b": llama2_7b,
        "llama3_8b": llama3_8b,
        "qwen25_7b": qwen25_7b,
        "qwen25_7b_half_active": qwen25_7b_half_active,
        "small": small,
        "quickstart": quickstart,
    },
    "finetune": {"sft": sft, "small": small_sft},
}
"""By command and name; the first of a command is taken where none is named."""


def recipe_of(command: str, name: str | None = None) -> AnyRunConfig:
    """The recipe of that name for a command.

    Raises:
        UserError: No such recipe; the nearest name is offered.
    """
    recipes = RECIPES[command]
    name = name or next(iter(recipes))
    if name not in recipes:
        raise UserError(
            f"--recipe {name} is unknown. Recipes: {', '.join(recipes)}.{nearest(name, recipes)}"
        )
    return recipes[name]()


def recipe(name: str = "default", **changes: Any) -> RunConfig:
    """A named recipe with fields of `RunConfig` replaced, such as `model`, `out` and `data`."""
    config = recipe_of("convert", name)
    assert isinstance(config, RunConfig)
    return replace(config, **changes)


def finetune_recipe(name: str = "sft", **changes: Any) -> FinetuneRunConfig:
    """A named recipe with fields of `FinetuneRunConfig` replaced, such as `run` and `out`."""
    config = recipe_of("finetune", name)
    assert isinstance(config, FinetuneRunConfig)
    return replace(config, **changes)
