"""A run before its first stage: input accepted, model loaded, folder made; by all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from dotmoe.artifacts import DenseModel
from dotmoe.baselines import METHODS, granularity_of
from dotmoe.checkpoint_folder import fingerprint
from dotmoe.config import RunConfig, check
from dotmoe.distributed import from_first, num_ranks, on_every_rank, require_equal_shares
from dotmoe.errors import UserError
from dotmoe.export import require_exportable
from dotmoe.export.weights_on_disk import on_disk
from dotmoe.granularity import Granularity, resolve
from dotmoe.load import load_dense
from dotmoe.narration import Narrator
from dotmoe.run_folder import RunFolder
from dotmoe.sharded_weights import is_divided
from dotmoe.tokenise import require_sources, samples_itself


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedRun:
    """What every stage of a conversion works with."""

    config: RunConfig
    dense: DenseModel
    granularity: Granularity
    router_dtype: torch.dtype
    """Dtype of the checkpoint to be written."""
    folder: RunFolder
    narrator: Narrator

    @classmethod
    def of(cls, config: RunConfig, narrator: Narrator) -> Self:
        """Load the model, and make the run folder if everything fits; all ranks together.

        Raises:
            UserError: Bad input.
        """
        config = from_first(lambda: _accepted(config))
        dense = load_dense(config.model, config.load)
        if is_divided(dense.model) and samples_itself(config.data):
            from_first(_refuse_samples)
        granularity, router_dtype = on_every_rank(lambda: _fitted(config, dense))
        from_first(lambda: RunFolder.open(config).path)
        return cls(
            config=config,
            dense=dense,
            granularity=granularity,
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

    def on_one_rank(self) -> Self:
        """The same with a model that one rank can run: weights that are divided stay on disk."""
        if not is_divided(self.dense.model):
            return self
        device, dtype = self.dense.device, next(self.dense.model.parameters()).dtype
        return replace(self, dense=on_disk(self.dense, device, dtype))


def settled(config: RunConfig) -> RunConfig:
    """The config with what `method` decides for the alignment phase written out.

    A method other than DOT-MoE keeps its experts; its router is trained for `router_steps`.

    Raises:
        UserError: Steps for a method whose shared expert the alignment phase does not know, or
            several ranks for a method that knows one.
    """
    if config.method == "dot_moe":
        return config
    if num_ranks() > 1:
        raise UserError(
            f"method is {config.method}, which runs in one process, and torchrun started "
            f"{num_ranks()}. Start without torchrun."
        )
    steps = config.baseline.router_steps
    if steps and config.method in METHODS and METHODS[config.method].has_shared_expert:
        raise UserError(
            f"router_steps is {steps}, but {config.method} has a shared expert, which the "
            "alignment phase does not train beside. Set router_steps to 0."
        )
    align = replace(config.align, steps=steps, learn_assignment=False)
    return replace(config, align=align)


def _accepted(config: RunConfig) -> RunConfig:
    """The config settled, after refusing what can be seen before anything is loaded."""
    check(config)
    config = settled(config)
    if config.align.steps:
        require_equal_shares(config.align.batch_size)
    RunFolder.require_usable(config)
    if not RunFolder(Path(config.out)).is_finished("data"):
        require_sources(config)
    return config


def _fitted(config: RunConfig, dense: DenseModel) -> tuple[Granularity, torch.dtype]:
    """Granularity, and dtype of the export."""
    granularity = resolve(config.experts, dense.widths.ffn)
    granularity = granularity_of(config.method, granularity, config.baseline)
    return granularity, require_exportable(dense, granularity, config.export)


def _refuse_samples() -> None:
    raise UserError(
        "data is self, but text is sampled by one rank, from a model that is whole. Choose "
        "--sharding replicate, or tokenise before in a run of one rank with the same OUT."
    )
