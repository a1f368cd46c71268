"""Configs of whole runs: the stages' own configs together, and rules across stages."""

import dataclasses
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Self

import tyro
from tyro.conf import Positional

from dotmoe.align import AlignConfig
from dotmoe.baselines import BaselineConfig, MethodName
from dotmoe.calibrate import CalibrateConfig
from dotmoe.data.sources import DataConfig
from dotmoe.distributed import require_one_process
from dotmoe.errors import UserError
from dotmoe.export import ExportConfig
from dotmoe.finetuning import FinetuneConfig
from dotmoe.finetuning.repair import RepairConfig
from dotmoe.granularity import ExpertsConfig
from dotmoe.load import LoadConfig
from dotmoe.moe.assignment import AssignmentConfig
from dotmoe.options import HOW, at_least
from dotmoe.pruning import PruningName
from dotmoe.tokenise import SampleConfig
from dotmoe.training.loop import TrainingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One conversion, from a dense checkpoint to an exported and measured MoE."""

    command: ClassVar[str] = "convert"

    model: Annotated[Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Local folder, GGUF file or hub name of the dense model; `embedded` is the bundled one."""
    out: Annotated[Positional[str], tyro.conf.arg(metavar="OUT"), HOW]
    """Run folder to write; the checkpoint will be in its `5_export`."""
    method: MethodName = "dot_moe"
    """How neurons come to experts: `dot_moe` learns it; the others are published methods without
    training, on the same budget."""
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    assignment: AssignmentConfig = field(default_factory=AssignmentConfig)
    align: AlignConfig = field(default_factory=AlignConfig)
    repair: bool = False
    """Bring each layer's output back to the dense model's once experts are chosen: W_down refitted
    in closed form, then all projections of the FFN trained (`--repair-epochs`)."""
    repairing: RepairConfig = field(default_factory=RepairConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    training: Annotated[TrainingConfig, HOW] = field(default_factory=TrainingConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    eval_text: tuple[str, ...] = ()
    """Files to measure perplexity on. Default: blocks of the data kept out of training."""
    other_text: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()
    """Files to measure perplexity on besides."""
    eval_tokens: Annotated[int, at_least(2)] = 65536
    """Tokens of text to measure perplexity on, at most."""
    seed: Annotated[int, at_least(0)] = 0
    """Of initial values and data order. Same seed, machine and thread count: same result."""

    def settled(self) -> Self:
        """With what `method` decides for the alignment phase written out.

        A method other than DOT-MoE keeps its experts; its router is trained for `router_steps`.

        Raises:
            UserError: Such a method on several ranks.
        """
        if self.method == "dot_moe":
            return self
        require_one_process(f"method {self.method}")
        steps = self.baseline.router_steps
        return replace(self, align=replace(self.align, steps=steps, learn_assignment=False))


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneRunConfig:
    """Training of a finished conversion, to an exported and measured MoE."""

    command: ClassVar[str] = "finetune"

    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN"), HOW]
    """Folder of a finished `dotmoe convert`; it is not changed."""
    out: Annotated[Positional[str], tyro.conf.arg(metavar="OUT"), HOW]
    """Run folder to write; the checkpoint will be in its `5_export`."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text to train on. Default: the sources of RUN, read as RUN did."""
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    repairing: RepairConfig = field(default_factory=RepairConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    training: Annotated[TrainingConfig, HOW] = field(default_factory=TrainingConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    eval_text: tuple[str, ...] = ()
    """Files to measure perplexity on. Default: the held-out text of RUN, so that figures compare.
    Blocks of the training text that are part of it are left out."""
    eval_tokens: Annotated[int, at_least(2)] = 65536
    """Tokens of `eval_text` to measure perplexity on, at most."""
    seed: Annotated[int, at_least(0)] = 0
    """Of the data order, and of adapters."""

    def check_together(self) -> None:
        """Refuse options of a text that is not named."""
        if self.data.data:
            return
        default = DataConfig()
        for option in dataclasses.fields(DataConfig):
            value = getattr(self.data, option.name)
            if option.name != "seq_len" and value != getattr(default, option.name):
                raise UserError(
                    f"{option.name} is {value}, but data names no source: the text of RUN is read "
                    f"as RUN did. Give data, or leave {option.name} out."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneRunConfig:
    """A dense checkpoint pruned and measured: a row of a comparison."""

    command: ClassVar[str] = "compare"

    model: str
    out: Annotated[str, HOW]
    method: PruningName
    experts: ExpertsConfig
    """Its budget: as many parameters as are active in a conversion with these experts."""
    data: DataConfig
    sample: SampleConfig
    calibrate: CalibrateConfig
    """Only its tokens."""
    load: LoadConfig
    eval_text: tuple[str, ...]
    other_text: tuple[str, ...] = ()
    eval_tokens: Annotated[int, at_least(2)]
    steps: Annotated[int, at_least(0)] = 0
    """Of a method that is trained, each on `batch_size` blocks."""
    batch_size: Annotated[int, at_least(1)] = 1
    seed: Annotated[int, at_least(0)] = 0

    def check_together(self) -> None:
        """Refuse several ranks."""
        require_one_process(f"method {self.method}")


AnyRunConfig = RunConfig | FinetuneRunConfig
"""A config of a run that lives in a run folder."""
