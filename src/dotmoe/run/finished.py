"""Reads from a finished run what other commands need."""

from functools import cached_property
from pathlib import Path
from typing import Any

from dotmoe.common.errors import UserError
from dotmoe.method.layout import Layouts, load_layouts
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.identity import fingerprint
from dotmoe.models.load import MODEL, describe_dense, describe_trained
from dotmoe.run.config import AnyRunConfig, FinetuneRunConfig, RunConfig
from dotmoe.run.folder import RunFolder
from dotmoe.text.answers import OwnAnswers
from dotmoe.text.tokenise import HELDOUT_FILES, NO_ANSWERS, TokenisedText


class FinishedRun:
    """A run of `dotmoe convert` or `dotmoe finetune` with final experts; refuses any other."""

    def __init__(self, path: Path) -> None:
        self.folder = folder = RunFolder(path)
        unknown: dict[str, Any] = {"command": "convert", "config": {}}
        manifest = folder.manifest if folder.exists else unknown
        is_finetuned = manifest["command"] == "finetune"
        last = "repair" if manifest["config"].get("repair") else "extract"
        self.made_by = "finetune" if is_finetuned else last
        """The stage that made the experts."""
        self.has_own_weights = self.made_by != "extract"
        """Whether the run's weights differ from the original dense model's."""
        if self.made_by in manifest.get("stages", {}) and not folder.has(self.made_by):
            raise UserError(
                f"{folder.path_of(self.made_by)} is gone. Delete {folder.to_delete(self.made_by)} "
                "and repeat the command that made it."
            )
        if not folder.has(self.made_by):
            raise UserError(
                f"{path} is no run with a finished {self.made_by} stage. Give the OUT folder of "
                "dotmoe convert or finetune, or finish that run by repeating its command."
            )
        folder.verified(self.made_by)
        cls: type[AnyRunConfig] = FinetuneRunConfig if is_finetuned else RunConfig
        self.config = folder.config(cls)
        self.model = folder.model
        """The original dense model of the run: folder, or hub name with its commit."""

    @cached_property
    def layouts(self) -> Layouts:
        """The run's experts, routers and k."""
        return load_layouts(self.folder.path_of(self.made_by))

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of the original `model`, and of the `experts` with their weights."""
        model = self.folder.manifest["inputs"]["model"]
        return {"model": model, "experts": self.folder.fingerprint_of(self.made_by)}

    @cached_property
    def text(self) -> TokenisedText:
        """The run's text; checksums of its held-out text are verified, of its training text not."""
        return TokenisedText.load(self.folder.verified("data", *HELDOUT_FILES))

    @cached_property
    def answers(self) -> OwnAnswers:
        """What the dense model wrote for the run, if anything; checksums are verified."""
        if not self.folder.has("answers"):
            return NO_ANSWERS
        return OwnAnswers.load(self.folder.verified("answers"))

    def described(self) -> DenseModel:
        """Description of the dense checkpoint that has the experts' weights; see `origin`."""
        stage = self.folder.path_of(self.made_by)
        if (stage / MODEL).is_dir():  # all weights are in the run's folder, with checksums there
            return describe_dense(str(stage / MODEL))
        return describe_trained(self.origin(), stage) if self.has_own_weights else self.origin()

    def origin(self) -> DenseModel:
        """Description of the run's original dense checkpoint; refused if it has changed."""
        dense = describe_dense(self.folder.model_to_read)
        self.folder.require_inputs({"model": fingerprint(dense.folder)})
        return dense
