"""Configs of whole runs, made up of the configs of their stages; rules across stages; recipes."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from dotmoe.common.errors import UserError, nearest
from dotmoe.common.options import (
    ARGUMENT,
    HIDDEN,
    HOW,
    PLACE,
    Need,
    Shown,
    at_least,
    built,
    changed,
    in_python,
    require_effect,
)
from dotmoe.export.config import ExportConfig, GgufConfig
from dotmoe.method.config import (
    ALTERNATIVES,
    PAPER_ACTIVE,
    AlignConfig,
    AssignmentConfig,
    CalibrateConfig,
    ExpertsConfig,
    FinetuneConfig,
    RepairConfig,
)
from dotmoe.models.config import LoadConfig
from dotmoe.rivals.config import BASELINES, BaselineConfig, ComparedName, MethodName, PruningName
from dotmoe.run import needs as needs_of
from dotmoe.text.config import AnswersConfig, DataConfig
from dotmoe.training.config import TrainingConfig

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One conversion, from a dense checkpoint to an exported and measured MoE."""

    command: ClassVar[str] = "convert"
    needs: ClassVar[tuple[Need, ...]] = needs_of.CONVERT

    model: Annotated[str, ARGUMENT]
    """Local folder, GGUF file or hub name of the dense model; `embedded` is the bundled one."""
    out: Annotated[str, ARGUMENT, HOW, PLACE]
    """Folder to write: a run with its checkpoint in `5_export`; the runs of a compare."""
    method: MethodName = "dot_moe"
    """How neurons are assigned to experts. `dot_moe`: from data, or learned (`steps`); the others
    are published methods on the same budget."""
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    assignment: AssignmentConfig = field(default_factory=AssignmentConfig)
    align: AlignConfig = field(default_factory=AlignConfig)
    repair: bool = False
    """After experts are chosen, fit each layer's output to the dense model's: train all projections
    of the FFN, or refit W_down in closed form (`--repair-epochs 0`)."""
    repairing: RepairConfig = field(default_factory=RepairConfig)
    time: Annotated[str | None, Shown("DURATION"), HOW] = None
    """Longest time that the conversion may take on this machine, as 30m, 2h or 1d: the repair that
    loses least is chosen of those that fit by estimate (`dotmoe inspect` lists them), and recorded.
    Not together with options of a repair."""
    export: ExportConfig = field(default_factory=ExportConfig)
    training: Annotated[TrainingConfig, HOW] = field(default_factory=TrainingConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    eval_text: Annotated[tuple[str, ...], Shown("SOURCE")] = ()
    """Files to measure perplexity on. Default: blocks of the data kept out of training."""
    other_text: Annotated[tuple[str, ...], HIDDEN] = ()
    """More files to measure perplexity on, as a text of its own."""
    eval_tokens: Annotated[int, at_least(2)] = 32768
    """Maximum number of tokens to measure perplexity on."""
    seed: Annotated[int, at_least(0)] = 0
    """Seed of initial values and data order. Same seed, machine and thread count: same result."""
    followed: Annotated[tuple[str, ...], HIDDEN, HOW] = ()
    """Options that nobody gave in the run, and whose values followed from the model and others."""

    def calibration_tokens(self, width: int) -> int:
        """Number of tokens that calibration reads for a model of this width; 0: a random start."""
        at_random = self.method == "dot_moe" and self.calibrate.start == "random"
        return 0 if at_random else self.calibrate.tokens(width)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneRunConfig:
    """One finetuning, from a finished conversion to an exported and measured MoE."""

    command: ClassVar[str] = "finetune"
    needs: ClassVar[tuple[Need, ...]] = needs_of.FINETUNE

    run: Annotated[str, ARGUMENT, HOW, PLACE]
    """Folder of a finished `dotmoe convert`; it is not changed."""
    out: Annotated[str, ARGUMENT, HOW, PLACE]
    """Run folder to write; the checkpoint will be in its `5_export`."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text to train on. Default: the sources of RUN, read as RUN did."""
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    reuse_answers: bool = False
    """Learn from the answers that RUN was fitted to, which are written already; more are written
    only where they are too few. Default: other answers, of which the model learns more."""
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    training: Annotated[TrainingConfig, HOW] = field(default_factory=TrainingConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    eval_text: Annotated[tuple[str, ...], Shown("SOURCE")] = ()
    """Files to measure perplexity on. Default: the held-out text of RUN, so that results are
    comparable. Training blocks that are part of it are left out."""
    eval_tokens: Annotated[int, at_least(2)] = 32768
    """Maximum number of tokens of `eval_text` to measure perplexity on."""
    seed: Annotated[int, at_least(0)] = 0
    """Seed of the data order and of the initial adapters."""

    def check_together(self) -> None:
        """Refuse options for reading a text if no text is named, and RUN as OUT."""
        if self.run and os.path.realpath(self.run) == os.path.realpath(self.out):
            raise UserError(f"RUN and OUT are both {self.run}. Name a new folder as OUT.")
        if not self.data.data and self.data != DataConfig(seq_len=self.data.seq_len):
            raise UserError(
                "data names no source, so the text of RUN is read as RUN did, and only seq_len can "
                "differ. Give data, or leave its other options out."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneRunConfig(RunConfig):
    """One pruned and measured dense checkpoint: a row of a comparison.

    The budget is the number of active parameters of a conversion with `experts`. `calibrate` sets
    how many tokens are read; `align` sets steps and batches if the method is trained.
    """

    command: ClassVar[str] = "compare"
    needs: ClassVar[tuple[Need, ...]] = needs_of.PRUNE

    method: PruningName


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareConfig(RunConfig):
    """Comparison of several methods on one model, on one budget."""

    command: ClassVar[str] = "compare"
    needs: ClassVar[tuple[Need, ...]] = needs_of.COMPARE

    methods: tuple[ComparedName, ...] = ("dot_moe", *BASELINES)
    """Methods to compare. Each converts without training, once with its own router and once with a
    ridge-regressed one (but `lte`, whose experts are those of `weight_clusters`, and
    `static_pruning`, which has no router). With `router_steps` each is trained, too: `dot_moe` is
    aligned for as many steps from our start and by the paper's recipe, the others train their
    router for as many on the same batches. Pruning methods give a dense model with as many
    parameters as a conversion has active; those named 2_4 cannot choose how many, and all read as
    many tokens as a repaired conversion. `all`: every method of both kinds that fits the model.
    Default: all that convert."""
    mask_steps: Annotated[int, at_least(1)] = 300
    """Training steps of `disp_llm`, on the same batches as an alignment."""
    other_text: Annotated[tuple[str, ...], Shown("SOURCE")] = ()
    """Files of another domain to measure every row on too, up to `eval_tokens` tokens."""
    eval_text: Annotated[tuple[str, ...], Shown("SOURCE")] = ()
    """Files to measure every row on, up to `eval_tokens` tokens. A comparison needs them."""
    finetune_steps: Annotated[int, at_least(0)] = 0
    """Steps of finetuning after every conversion, on the same batches for all, from the repaired
    weights if there are any. Finetuned models are rows of their own. 0: no finetuning."""
    finetune_recipe: Literal["default", "paper", "sft", "small"] = "default"
    """Recipe of `dotmoe finetune` that gives all other settings of this finetuning but the length
    of its sequences, which is that of the comparison."""
    seeds: tuple[Annotated[int, at_least(0)], ...] = ()
    """Seeds to make every conversion with; the table shows mean, minimum and maximum. Default:
    `seed` alone."""
    method: Annotated[Literal["dot_moe"], HIDDEN] = "dot_moe"
    time: Annotated[str | None, HIDDEN, HOW] = None
    """None: the repair that a time allows differs by method, and all are repaired alike."""

    def check_together(self) -> None:
        """Refuse a method or a seed that is named twice."""
        for name in ("methods", "seeds"):
            values = getattr(self, name)
            twice = next((each for each in values if values.count(each) > 1), None)
            if twice is not None:
                raise UserError(f"{name} names {twice} twice. Name each once.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReexportConfig:
    """A finished run, and how to export it again."""

    needs: ClassVar[tuple[Need, ...]] = needs_of.EXPORT

    run: Annotated[str, ARGUMENT, PLACE]
    """Folder of a run that has finished its extract stage, or its repair or finetune stage."""
    out: Annotated[str, ARGUMENT, PLACE]
    """Folder to write; must be new or empty."""
    active_experts: Annotated[int | None, at_least(1)] = None
    """Number of experts that run per token (k), 1 to E. Default: that of the run."""
    export: GgufConfig = field(default_factory=GgufConfig)
    load: LoadConfig = field(default_factory=LoadConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickstartConfig:
    """The quickstart: dense, dotmoe and static pruning with the same repair, side by side."""

    out: Annotated[str, Shown("FOLDER"), PLACE] = "quickstart-run"
    """Folder to write; the same command resumes there if it was stopped."""
    seed: Annotated[int, at_least(0)] = 0
    """Seed of initial values and data order."""


AnyRunConfig = RunConfig | FinetuneRunConfig
"""A config of a run that lives in a run folder."""


PAPER = RunConfig(
    model="",
    out="",
    experts=ExpertsConfig(active=PAPER_ACTIVE, shared=0.0, first_dense_layers=0),
    data=DataConfig(data=("dolmino",)),
    calibrate=CalibrateConfig(start="random"),
    assignment=AssignmentConfig(solver="sinkhorn"),
    align=AlignConfig(surrogate="softmax", router_dtype="model", max_epochs=None),
)
"""The paper, on Dolmino-mix streamed from the hub unless `data` is given. What was
chosen where the paper is silent is listed in docs/research/paper_map.md."""
SMALL = RunConfig(
    model="",
    out="",
    experts=PAPER.experts,
    data=DataConfig(seq_len=256),
    align=AlignConfig(steps=300, batch_size=4, lr=1e-2, lr_router=1e-2, max_epochs=100.0),
)
"""Alignment for a few million parameters: higher learning rates, small batches, no repair."""


def _of_the_paper(model: str, active_experts: int) -> RunConfig:
    experts = replace(PAPER.experts, expert_size=128, active=None, active_experts=active_experts)
    return replace(PAPER, model=model, experts=experts)


RECIPES: dict[str, dict[str, AnyRunConfig]] = {
    "convert": {
        # Start from data and repair, no alignment: lost least where both were measured, in minutes.
        "default": RunConfig(model="", out="", align=AlignConfig(steps=0), repair=True),
        "paper": PAPER,
        # These have E = 86, 112, 148 and 148 experts per layer.
        "llama2_7b": _of_the_paper("meta-llama/Llama-2-7b-hf", active_experts=22),
        "llama3_8b": _of_the_paper("meta-llama/Meta-Llama-3-8B", active_experts=28),
        "qwen25_7b": _of_the_paper("Qwen/Qwen2.5-7B", active_experts=37),
        "qwen25_7b_half_active": _of_the_paper("Qwen/Qwen2.5-7B", active_experts=74),
        # sec:attention_moe: 7 of 14 experts of two heads.
        "qwen25_7b_attention": replace(
            PAPER,
            model="Qwen/Qwen2.5-7B",
            experts=replace(
                PAPER.experts, targets="attention", heads_per_expert=2, active_attention=0.5
            ),
        ),
        "small": SMALL,
        # The bundled model on the local Python standard library, in minutes on two CPU cores.
        "quickstart": replace(
            SMALL,
            model="embedded",
            experts=replace(PAPER.experts, expert_size=16),
            data=replace(SMALL.data, data=("python-stdlib",)),
            eval_text=("python-stdlib-heldout",),
        ),
    },
    "finetune": {
        # What recovered most of SmolLM2-135M, results/smollm2.json.
        "default": FinetuneRunConfig(
            run="",
            out="",
            data=DataConfig(seq_len=512),
            finetune=FinetuneConfig(
                train="experts",
                steps=240,
                batch_size=4,
                lr=None,
                lr_router=0.0,
                kl_weight=1.0,
                ce_weight=0.0,
            ),
        ),
        # Hyperparameters of tab:hyperparams_sft, 1.2B tokens, with our gradient of the routers.
        "sft": FinetuneRunConfig(run="", out=""),
        # Models of a few million parameters, in minutes on two CPU cores.
        "small": FinetuneRunConfig(
            run="",
            out="",
            data=DataConfig(seq_len=256),
            finetune=FinetuneConfig(
                steps=150, batch_size=4, lr=6e-4, lr_router=0.0, kl_weight=1.0, max_epochs=100.0
            ),
        ),
        # tab:hyperparams_sft with the paper's gradient of the routers.
        "paper": FinetuneRunConfig(
            run="",
            out="",
            finetune=FinetuneConfig(
                surrogate="softmax", router_dtype="model", unchosen="zero", max_epochs=None
            ),
        ),
    },
}
"""Recipes by command and name; the first recipe of a command is its default."""


def recipe_of(command: str, name: str | None = None) -> AnyRunConfig:
    """A recipe of a command, by default its first; `out` is empty, and mostly `model` or `run`."""
    recipes = RECIPES[command]
    name = name or next(iter(recipes))
    if name not in recipes:
        raise UserError(
            f"--recipe {name} is unknown. Recipes: {', '.join(recipes)}.{nearest(name, recipes)}"
        )
    return recipes[name]


def recipe(name: str = "default", **options: Any) -> RunConfig:
    """A named recipe of a conversion with options replaced, such as `model`, `out` and `active`.

    Options have the names of the command line with underscores. A whole group of them can be given
    as its config, such as `data=DataConfig(...)`.

    Raises:
        UserError: There is no such recipe or option, or an option has a wrong type or no effect,
            such as `lte_steps` without that method.
    """
    return cast(RunConfig, _changed("convert", name, options, "dotmoe.recipe"))


def finetune_recipe(name: str = "default", **options: Any) -> FinetuneRunConfig:
    """As `recipe`, for a finetuning: `run`, `out` and the options of `dotmoe finetune`."""
    return cast(FinetuneRunConfig, _changed("finetune", name, options, "dotmoe.finetune_recipe"))


def overridden(config: Options, given: Iterable[str]) -> Options:
    """The config without what a recipe or file says of a value that a given option determines.

    `--active` takes the place of the recipe's `active_experts`.
    """
    given = set(given)
    without = dict[str, None]()
    for group in ALTERNATIVES:
        if not given.isdisjoint(group):
            without |= dict.fromkeys(name for name in group if name not in given)
    return cast(Options, built(type(config), config, without))


def _changed(command: str, name: str, options: dict[str, Any], place: str) -> AnyRunConfig:
    start = recipe_of(command, name)
    groups = {each.name: getattr(start, each.name) for each in fields(start)}
    whole: dict[str, Any] = {
        name: value
        for name, value in options.items()
        if name in groups and is_dataclass(value) and type(value) is type(groups[name])
    }
    single = {name: value for name, value in options.items() if name not in whole}
    base = replace(start, **whole)
    config = built(type(base), base, in_python(type(base), single, place))
    config = overridden(config, single)
    require_effect(config, changed(config, start))
    return cast(AnyRunConfig, config)
