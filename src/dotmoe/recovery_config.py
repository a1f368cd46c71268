"""RecoveryConfig: what `dotmoe finetune` takes."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import tyro
from tyro.conf import Positional

from dotmoe.data import DataConfig
from dotmoe.export import ExportConfig
from dotmoe.finetune import FinetuneConfig
from dotmoe.load import LoadConfig
from dotmoe.training.config import TrainingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryConfig:
    """Recovery training of a finished conversion, to an exported and measured MoE."""

    command: ClassVar[str] = "finetune"
    only_how: ClassVar[tuple[str, ...]] = (
        "run",
        "out",
        "load.device",
        "load.sharding",
        "training",
        "finetune.micro_batch_size",
        "finetune.activation_checkpointing",
    )

    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN")]
    """Folder of a finished `dotmoe convert`; it is not changed."""
    out: Annotated[Positional[str], tyro.conf.arg(metavar="OUT")]
    """Run folder to write; the checkpoint will be in its `5_export`."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text to train on. Default: the sources of RUN."""
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    eval_text: tuple[str, ...] = ()
    """Files to measure perplexity on. Default: the held-out text of RUN, so that figures compare.
    Blocks of the training text that are part of it are left out."""
    eval_tokens: int = 65536
    """Tokens of `eval_text` to measure perplexity on, at most."""
    seed: int = 0
    """Of the data order, and of adapters."""

    def check(self) -> None:
        """Refuse numbers that no run can use, before anything is loaded.

        Raises:
            UserError: A number out of its range.
        """
        self.finetune.check()
        self.training.check()
