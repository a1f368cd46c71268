"""A finished run, read for what other commands need of it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dotmoe.checkpoint.folder import fingerprint
from dotmoe.config import AnyRunConfig, FinetuneRunConfig, RunConfig
from dotmoe.errors import UserError
from dotmoe.finetuning import LAYOUT, MODEL
from dotmoe.layout import ExpertLayout
from dotmoe.run_folder import RunFolder
from dotmoe.tokenise import HELDOUT_FILES, Text


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A run of `dotmoe convert` or `dotmoe finetune` whose experts are final."""

    folder: RunFolder
    config: AnyRunConfig
    model: str
    """What the user called the dense model that the run began with."""
    fingerprint: str
    """Of that model's files when the run was made."""
    is_finetuned: bool
    """Whether the weights are others than the dense model's."""
    stage: Path
    """Folder of the stage that made the experts."""

    @property
    def command(self) -> str:
        """`convert` or `finetune`."""
        return self.config.command

    @property
    def weights(self) -> str:
        """The dense checkpoint whose weights the experts have."""
        return str(self.stage / MODEL) if self.is_finetuned else self.model

    @cached_property
    def layout(self) -> ExpertLayout:
        """Experts, routers and k."""
        return ExpertLayout.load(self.stage / LAYOUT)

    @property
    def layout_fingerprint(self) -> str:
        """SHA-256 of the file of the layout."""
        sha256: str = self.folder.manifest["stages"][self._stage_name]["files"][LAYOUT]["sha256"]
        return sha256

    @cached_property
    def text(self) -> Text:
        """Its held-out text, verified, and its training text, which is not."""
        return Text.load(self.folder.verified("data", *HELDOUT_FILES))

    def require_same_model(self, folder: Path) -> None:
        """Refuse a dense model that has changed since the run was made.

        Raises:
            UserError: The files in `folder` are not those of `fingerprint`.
        """
        if fingerprint(folder) != self.fingerprint:
            raise UserError(
                f"{self.folder.path} was started with another model of that name: its files have "
                "changed since. Restore them, or choose another run."
            )

    @property
    def _stage_name(self) -> str:
        return "finetune" if self.is_finetuned else "extract"


def finished_run(path: Path) -> FinishedRun:
    """The run in a folder; its experts and held-out text are verified.

    Raises:
        UserError: No run there, its experts are not final yet, or its files are damaged.
    """
    folder = RunFolder(path)
    is_finetuned = folder.exists and folder.manifest["command"] == FinetuneRunConfig.command
    stage = "finetune" if is_finetuned else "extract"
    if not folder.holds(stage):
        raise UserError(
            f"{path} is no run with a finished {stage} stage. Name the OUT folder of dotmoe "
            "convert or finetune, or finish that run by repeating its command."
        )
    return FinishedRun(
        folder=folder,
        config=folder.config(FinetuneRunConfig) if is_finetuned else folder.config(RunConfig),
        model=folder.manifest["model"],
        fingerprint=folder.manifest["inputs"]["model"],
        is_finetuned=is_finetuned,
        stage=folder.verified(stage),
    )
