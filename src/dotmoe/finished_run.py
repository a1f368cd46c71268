"""A finished run, read for what other commands need of it."""

from functools import cached_property
from pathlib import Path
from typing import Any

from dotmoe.checkpoint import fingerprint
from dotmoe.config import AnyRunConfig, FinetuneRunConfig, RunConfig
from dotmoe.errors import UserError
from dotmoe.finetuning import LAYOUT, MODEL
from dotmoe.layout import ExpertLayout
from dotmoe.load import describe_dense
from dotmoe.models.family import DenseModel
from dotmoe.run_folder import RunFolder
from dotmoe.tokenise import HELDOUT_FILES, Text


class FinishedRun:
    """A run of `dotmoe convert` or `dotmoe finetune` with final experts; others are refused."""

    def __init__(self, path: Path) -> None:
        self.folder = folder = RunFolder(path)
        unknown: dict[str, Any] = {"command": "convert", "config": {}}
        manifest = folder.manifest if folder.exists else unknown
        is_finetuned = manifest["command"] == "finetune"
        last = "repair" if manifest["config"].get("repair") else "extract"
        self.made_by = "finetune" if is_finetuned else last
        """The stage that made the experts."""
        self.has_own_weights = self.made_by != "extract"
        """Whether the weights are others than the dense model's."""
        if not folder.holds(self.made_by):
            raise UserError(
                f"{path} is no run with a finished {self.made_by} stage. Name the OUT folder of "
                "dotmoe convert or finetune, or finish that run by repeating its command."
            )
        stage = folder.verified(self.made_by)
        cls: type[AnyRunConfig] = FinetuneRunConfig if is_finetuned else RunConfig
        self.config = folder.config(cls)
        self.model: str = manifest["model"]
        """What the user called the dense model that the run began with."""
        self.weights = str(stage / MODEL) if self.has_own_weights else self.model
        """The dense checkpoint whose weights the experts have."""

    @cached_property
    def layout(self) -> ExpertLayout:
        """Experts, routers and k."""
        return ExpertLayout.load(self.folder.stage(self.made_by) / LAYOUT)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of the `model` that the run began with, and of the file of the `layout`."""
        manifest = self.folder.manifest
        layout = manifest["stages"][self.made_by]["files"][LAYOUT]["sha256"]
        return {"model": manifest["inputs"]["model"], "layout": layout}

    @cached_property
    def text(self) -> Text:
        """Its held-out text, verified, and its training text, which is not."""
        return Text.load(self.folder.verified("data", *HELDOUT_FILES))

    def described(self) -> DenseModel:
        """The dense checkpoint whose weights the experts have, described; see `origin`."""
        # Weights of its own lie in the run, and have checksums there.
        return describe_dense(self.weights) if self.has_own_weights else self.origin()

    def origin(self) -> DenseModel:
        """The dense checkpoint that the run began with, described; refused if it has changed."""
        dense, inputs = describe_dense(self.model), self.folder.manifest["inputs"]
        self.folder.require_inputs(inputs | {"model": fingerprint(dense.folder)})
        return dense
