"""A finished run that is analysed, and what several analyses need of it."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import tyro
from torch import Tensor
from tyro.conf import Positional

from dotmoe.analyse.routing import Routes, captured_routes
from dotmoe.config import FinetuneRunConfig, RunConfig
from dotmoe.distributed import resolved_device
from dotmoe.errors import UserError
from dotmoe.finished_run import finished_run
from dotmoe.load import LoadConfig, load_dense
from dotmoe.models.dense import DenseModel
from dotmoe.options import at_least
from dotmoe.progress import Progress
from dotmoe.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalyseConfig:
    """What to analyse of a finished run."""

    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN")]
    """Folder of a finished `dotmoe convert` or `dotmoe finetune`."""
    only: tuple[str, ...] = ()
    """Make these of expert_utilisation, routing_overlap, expert_outputs_tsne, alignment_history,
    overhead_profile. Default: all that the run has something for."""
    tokens: Annotated[int, at_least(1)] = 32768
    """Tokens of the held-out text to route, at most; at least one block."""
    layer: Annotated[int | None, at_least(0)] = None
    """Layer whose expert outputs are shown, a split one. Default: the one at a third of the depth,
    as the paper's."""
    points: Annotated[int, at_least(10)] = 1000
    """Expert outputs that are shown, about."""
    experts_shown: Annotated[int, at_least(2)] = 16
    """Experts whose outputs are shown, at most; 2 or more."""
    profile_steps: Annotated[int, at_least(1)] = 5
    """Alignment steps that are timed."""
    seed: Annotated[int, at_least(0)] = 0
    """Of samples and of t-SNE."""
    load: LoadConfig = field(default_factory=LoadConfig)


class AnalysedRun:
    """A finished run; what takes time is made when it is first asked for."""

    def __init__(self, config: AnalyseConfig, progress: Progress) -> None:
        self.config = config
        self.progress = progress
        self.run = finished_run(Path(config.run))
        self.folder = self.run.folder
        self.layout = self.run.layout
        self.is_finetuned = self.run.is_finetuned
        self.weights = self.run.weights
        """The checkpoint whose weights the experts have."""
        heldout = self.run.text.heldout
        self.tokens: Tensor = heldout.tokens_BT[: max(1, config.tokens // heldout.seq_len)]
        """The text that is routed: the first blocks kept out of training."""
        layers = self.layout.moe_layers
        self.layer = layers[len(layers) // 3] if config.layer is None else config.layer
        """Layer whose expert outputs are shown."""
        if self.layer not in layers:
            raise UserError(
                f"layer is {self.layer}, but the split layers are {layers.start} to "
                f"{layers.stop - 1}. Choose one of them."
            )

    def option(self, name: str) -> Any:
        """An option as it came out: layer and device are resolved."""
        if name == "layer":
            return self.layer
        if name == "device":
            return str(resolved_device(self.config.load.device))
        return self.config.load.dtype if name == "dtype" else getattr(self.config, name)

    @cached_property
    def dense(self) -> DenseModel:
        """The weights that the experts are made of."""
        dense = load_dense(self.weights, self.config.load)
        if not self.is_finetuned:  # whose weights lie in the run, and have checksums there
            self.run.require_same_model(dense.folder)
        return dense

    @cached_property
    def routes(self) -> Routes:
        """Experts that each token runs."""
        with self.progress.bar("route held-out text") as update:
            return captured_routes(self.dense, self.layout, self.tokens, update)

    @cached_property
    def aligned(self) -> RunFolder | None:
        """The run that was aligned: this one, or that which was finetuned, if it is there."""
        path = self.folder.path
        if isinstance(self.run.config, FinetuneRunConfig):
            path = Path(self.run.config.run)
        folder = RunFolder(path)
        if not folder.exists or folder.manifest["command"] != RunConfig.command:
            return None
        was = folder.holds("align") and (folder.stage("align") / "metrics.jsonl").is_file()
        return folder if was else None

    @property
    def text(self) -> list[str]:
        """Names of the text that is routed."""
        return list(self.run.text.heldout_name)
