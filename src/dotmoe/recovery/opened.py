"""A recovery before its first stage: input accepted, folder made; by all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from dotmoe.artifacts import DenseModel
from dotmoe.checkpoint_folder import fingerprint
from dotmoe.config import RunConfig, check
from dotmoe.device import resolved_device
from dotmoe.distributed import (
    from_first,
    on_every_rank,
    require_equal_shares,
    started_by_torchrun,
)
from dotmoe.errors import UserError
from dotmoe.export import require_exportable
from dotmoe.export.architecture import granularity_of
from dotmoe.export.weights_on_disk import on_disk
from dotmoe.finetune import require_peft
from dotmoe.load import describe_dense, load_dense, resolved_dtype
from dotmoe.narration import Narrator
from dotmoe.recovery_config import RecoveryConfig
from dotmoe.reexport import Learned, learned
from dotmoe.run_folder import RunFolder
from dotmoe.sharded_weights import Sharding, checkpoint_dtype, is_sharded, unloaded
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

    def for_one_rank(self, source: str) -> DenseModel:
        """A dense checkpoint that one rank can run alone: one too large for that stays on disk."""
        device = resolved_device(self.config.load.device)
        if started_by_torchrun() and self.is_sharded(device):
            dtype = resolved_dtype(self.config.load.dtype, device)
            return on_disk(describe_dense(source), device, dtype)
        return load_dense(source, replace(self.config.load, sharding="replicate"))

    def is_sharded(self, device: torch.device) -> bool:
        """Whether several ranks would divide what is trained.

        Weights, gradients and two moments in float32 are 16 bytes for each that is trained.
        """
        num_weights = sum(p.numel() for p in self.dense.model.parameters())
        dtype = checkpoint_dtype(self.dense.config, self.dense.folder)
        num_bytes = 16 if self.config.finetune.train == "everything" else dtype.itemsize
        return is_sharded(self.config.load.sharding, num_bytes * num_weights, device)

    def loaded(self, sharding: Sharding = "replicate") -> DenseModel:
        """The dense model, whole unless said otherwise."""
        return load_dense(self.start.model, replace(self.config.load, sharding=sharding))

    def unloaded(self, device: torch.device) -> DenseModel:
        """The dense model without weights, in the dtype to compute in on a device."""
        dtype = resolved_dtype(self.config.load.dtype, device)
        if dtype == "auto":
            dtype = checkpoint_dtype(self.dense.config, self.dense.folder)
        return replace(self.dense, model=unloaded(self.dense.config, dtype))


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
