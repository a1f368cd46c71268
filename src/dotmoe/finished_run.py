"""A finished run, read for what other commands need of it."""

from functools import cached_property
from pathlib import Path

from dotmoe.checkpoint import fingerprint
from dotmoe.config import AnyRunConfig, FinetuneRunConfig, RunConfig
from dotmoe.errors import UserError
from dotmoe.finetuning import LAYOUT, MODEL
from dotmoe.layout import ExpertLayout
from dotmoe.load import describe_dense
from dotmoe.models.dense import DenseModel
from dotmoe.run_folder import RunFolder
from dotmoe.tokenise import HELDOUT_FILES, Text


class FinishedRun:
    """A run of `dotmoe convert` or `dotmoe finetune` whose experts are final.

    Raises:
        UserError: No run there, its experts are not final yet, or its files are damaged.
    """

    def __init__(self, path: Path) -> None:
        self.folder = folder = RunFolder(path)
        is_finetuned = folder.exists and folder.manifest["command"] == "finetune"
        self.made_by = "finetune" if is_finetuned else "extract"
        """The stage that made the experts."""
        if folder.exists and folder.manifest["config"].get("repair"):
            self.made_by = "repair"
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
        self.model: str = folder.manifest["model"]
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
        """The dense checkpoint whose weights the experts have, described.

        Raises:
            UserError: It has changed since the run was made.
        """
        dense = describe_dense(self.weights)
        self.require_same_model(dense.folder)
        return dense

    def origin(self) -> DenseModel:
        """The dense checkpoint that the run began with, described.

        Raises:
            UserError: It is gone, or has changed since.
        """
        dense = describe_dense(self.model)
        self.folder.require_inputs(
            self.folder.manifest["inputs"] | {"model": fingerprint(dense.folder)}
        )
        return dense

    def require_same_model(self, folder: Path) -> None:
        """Refuse a dense model that has changed since the run was made.

        Raises:
            UserError: The files in `folder` are not those that the run began with.
        """
        if not self.has_own_weights:  # whose weights lie in the run, and have checksums there
            self.folder.require_inputs({"model": fingerprint(folder)})
