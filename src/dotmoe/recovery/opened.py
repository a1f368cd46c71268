"""A recovery before its first stage: input accepted, folder made; by all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from dotmoe.artifacts import DenseModel
from dotmoe.checkpoint_folder import fingerprint
from dotmoe.config import RunConfig, check
from dotmoe.distributed import from_first, on_every_rank, require_equal_shares
from dotmoe.errors import UserError
from dotmoe.export import require_exportable
from dotmoe.export.architecture import granularity_of
from dotmoe.finetune import require_peft
from dotmoe.load import describe_dense, load_dense
from dotmoe.narration import Narrator
from dotmoe.recovery_config import RecoveryConfig
from dotmoe.reexport import Learned, learned
from dotmoe.run_folder import RunFolder
from dotmoe.tokenise import require_sources


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedRecovery:
    """What every stage of a recovery works with."""

    config: RecoveryConfig
    source: RunFolder
    """The run whose model is trained."""
    converted: RunConfig
    """Its config, with the text and the export of the recovery."""
    start: Learned
    """What it has learned."""
    dense: DenseModel
    """The dense model, described: without weights."""
    router_dtype: torch.dtype
    """Dtype of the checkpoint to be written."""
    folder: RunFolder
    narrator: Narrator

    @classmethod
    def of(cls, config: RecoveryConfig, narrator: Narrator) -> Self:
        """Make the run folder if everything fits; all ranks together.

        Raises:
            UserError: Bad input.
        """
        config.check()
        if config.finetune.train == "lora":
            require_peft()
        from_first(lambda: RunFolder.require_usable(config))
        found = on_every_rank(lambda: learned(Path(config.run)))
        if found.is_finetuned:
            raise UserError(
                f"{config.run} is finetuned already. Name the run of dotmoe convert that it "
                "was made of, and train for more steps."
            )
        source = RunFolder(Path(config.run))
        converted = _with_changes(source.config(RunConfig), config)
        check(converted)
        require_equal_shares(config.finetune.batch_size)
        dense = on_every_rank(lambda: describe_dense(found.model))
        source.require_model(fingerprint(dense.folder))
        if not RunFolder(Path(config.out)).is_finished("data"):
            require_sources(converted)
        router_dtype = require_exportable(dense, granularity_of(found.layout), config.export)
        from_first(lambda: RunFolder.open(config).path)
        return cls(
            config=config,
            source=source,
            converted=converted,
            start=found,
            dense=dense,
            router_dtype=router_dtype,
            folder=RunFolder(Path(config.out)),
            narrator=narrator,
        )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep others out of the run folder; leave nothing of a run that finishes no stage."""
        with self.folder.alone():
            try:
                self.folder.require_model(fingerprint(self.dense.folder))
                yield
            except BaseException:
                self.folder.discard_if_unstarted()
                raise

    def loaded(self, **changes: Any) -> DenseModel:
        """The dense model, whole unless said otherwise."""
        return load_dense(
            self.start.model, replace(self.config.load, **{"sharding": "replicate", **changes})
        )


def _with_changes(converted: RunConfig, config: RecoveryConfig) -> RunConfig:
    """The run's config with what the recovery says of text and export."""
    data = config.data
    if not data.data:
        data = replace(converted.data, seq_len=data.seq_len)
    return replace(
        converted,
        data=data,
        export=config.export,
        eval_text=config.eval_text or converted.eval_text,
        eval_tokens=config.eval_tokens,
        seed=config.seed,
    )
