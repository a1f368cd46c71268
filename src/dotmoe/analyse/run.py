"""A finished run that is analysed, and what several analyses need of it."""

from functools import cached_property
from pathlib import Path

from torch import Tensor

from dotmoe.analyse.config import AnalyseConfig
from dotmoe.analysis import Routes, captured_routes
from dotmoe.artifacts import DenseModel
from dotmoe.checkpoint_folder import fingerprint
from dotmoe.config import RunConfig, command_in
from dotmoe.errors import UserError
from dotmoe.layout import ExpertLayout
from dotmoe.load import load_dense
from dotmoe.narration import Narrator
from dotmoe.recovery_config import RecoveryConfig
from dotmoe.reexport import Learned, learned
from dotmoe.run_folder import RunFolder
from dotmoe.tokenise import measured_on


class AnalysedRun:
    """A finished run, and what several analyses need of it, made when first asked for."""

    def __init__(self, config: AnalyseConfig, narrator: Narrator) -> None:
        self.config = config
        self.narrator = narrator
        self.found: Learned = learned(Path(config.run))
        self.folder = RunFolder(Path(config.run))
        self.layers = self.found.layout.moe_layers
        if config.layer is not None and config.layer not in self.layers:
            raise UserError(
                f"layer is {config.layer}, but the split layers are {self.layers.start} to "
                f"{self.layers.stop - 1}. Choose one of them."
            )

    @property
    def layout(self) -> ExpertLayout:
        """Experts, routers and k."""
        return self.found.layout

    @property
    def layer(self) -> int:
        """Layer whose expert outputs are shown."""
        third = self.layers[len(self.layers) // 3]
        return third if self.config.layer is None else self.config.layer

    @cached_property
    def dense(self) -> DenseModel:
        """The weights that the experts are made of."""
        dense = load_dense(self.found.model, self.config.load)
        if not self.found.is_finetuned:  # whose weights lie in the run, and have checksums there
            self.folder.require_model(fingerprint(dense.folder))
        return dense

    @cached_property
    def tokens(self) -> Tensor:
        """The text that is routed: the first blocks kept out of training."""
        blocks = self.found.heldout
        return blocks.tokens_BT[: max(1, self.config.tokens // blocks.seq_len)]

    @cached_property
    def routes(self) -> Routes:
        """Experts that each token runs."""
        with self.narrator.bar("route held-out text") as update:
            return captured_routes(self.dense, self.layout, self.tokens, update)

    @cached_property
    def aligned(self) -> RunFolder | None:
        """The run that was aligned: this one, or that which was finetuned, if it is there."""
        path = self.folder.path
        if self.found.is_finetuned:
            path = Path(self.folder.config(RecoveryConfig).run)
        stored = path / "config.json"
        if not stored.is_file() or command_in(stored) != RunConfig.command:
            return None
        folder = RunFolder(path)
        was = folder.is_finished("align") and (path / "2_align" / "metrics.jsonl").is_file()
        return folder if was else None

    @property
    def text(self) -> list[str]:
        """Names of the text that is routed."""
        if self.found.is_finetuned:
            own = self.folder.config(RecoveryConfig).eval_text
            return list(own or (f"held-out text of {self.folder.config(RecoveryConfig).run}",))
        return list(measured_on(self.folder.config(RunConfig)))
