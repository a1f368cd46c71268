"""Named runs as functions; a variant is `replace()` on another recipe.

A recipe leaves `model` and `out` to the caller. Numbers at the paper's scale are the paper's;
`quickstart` is scaled down to minutes on two CPU cores.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

from dotmoe.align import AlignConfig
from dotmoe.calibrate import CalibrateConfig
from dotmoe.config import AnyRunConfig, FinetuneRunConfig, RunConfig
from dotmoe.data.sources import DataConfig
from dotmoe.errors import UserError, nearest
from dotmoe.finetuning import FinetuneConfig
from dotmoe.granularity import ExpertsConfig
from dotmoe.moe.assignment import AssignmentConfig


def default() -> RunConfig:
    """Our start and a repair, no alignment: what kept most where both were measured, in minutes.

    With `steps` it is aligned before the repair, by the paper's hyperparameters with our router
    surrogate and solver.
    """
    return RunConfig(model="", out="", align=AlignConfig(steps=0), repair=True)


def paper() -> RunConfig:
    """The paper to the letter: random start, softmax surrogate, 50 unrolled Sinkhorn sweeps.

    Its text is Dolmino-mix, streamed from the hub where no other `data` is given.
    """
    return RunConfig(
        model="",
        out="",
        data=DataConfig(data=("dolmino",)),
        calibrate=CalibrateConfig(start="random"),
        assignment=AssignmentConfig(solver="sinkhorn", sinkhorn_sweeps=50),
        align=AlignConfig(surrogate="softmax"),
    )


def paper_model(model: str, active_experts: int) -> RunConfig:
    """The paper's run of one of its models: experts of 128 neurons, k of them active."""
    experts = ExpertsConfig(expert_size=128, active_experts=active_experts)
    return replace(paper(), model=model, experts=experts)


def paper_attention() -> RunConfig:
    """The paper's run on attention (sec:attention_moe): 7 of 14 experts of two heads."""
    experts = ExpertsConfig(targets="attention", heads_per_expert=2, active_attention=0.5)
    return replace(paper(), model="Qwen/Qwen2.5-7B", experts=experts)


def small() -> RunConfig:
    """Alignment of models of some million parameters: higher rates, small batches, no repair."""
    return RunConfig(
        model="",
        out="",
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
            steps=150, batch_size=4, lr=6e-4, lr_router=0.0, kl_weight=1.0, max_epochs=100.0
        ),
    )


RECIPES: dict[str, dict[str, Callable[[], AnyRunConfig]]] = {
    "convert": {
        "default": default,
        "paper": paper,
        "llama2_7b": partial(paper_model, "meta-llama/Llama-2-7b-hf", 22),  # E = 86
        "llama3_8b": partial(paper_model, "meta-llama/Meta-Llama-3-8B", 28),  # E = 112
        "qwen25_7b": partial(paper_model, "Qwen/Qwen2.5-7B", 37),  # E = 148
        "qwen25_7b_half_active": partial(paper_model, "Qwen/Qwen2.5-7B", 74),
        "qwen25_7b_attention": paper_attention,
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
    return cast(RunConfig, replace(recipe_of("convert", name), **changes))


def finetune_recipe(name: str = "sft", **changes: Any) -> FinetuneRunConfig:
    """A named recipe with fields of `FinetuneRunConfig` replaced, such as `run` and `out`."""
    return cast(FinetuneRunConfig, replace(recipe_of("finetune", name), **changes))
