"""Finish markers: which stage ran to its end, and what it left that is read again."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dotmoe.checksums import FileSum, damage_in, manifest_of
from dotmoe.errors import UserError
from dotmoe.run_folder.stages import STAGES, from_stage_on
from dotmoe.run_folder.whole_files import sync, write_text
from dotmoe.sealed_json import DamagedError, sealed, unsealed

_FOLDER = "finished"
_NEVER_READ_AGAIN = ("checkpoints", "tensorboard", "wandb")
_RESULTS_OF_THE_STAGE = {"evaluate": ["results.json"]}
"""What else lies in its folder is of other commands, which replace it at any time."""
_OWN_CHECKSUMS = "export"
"""`dotmoe edit` changes an export in place, so its own record holds the checksums."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The markers of a run folder.

    A marker is a sealed JSON file with the size and SHA-256 of every file of its stage that later
    stages or commands read, the model it was made with, and the stages finished before it.
    """

    run: Path
    """The run folder."""

    def finished(self) -> list[str]:
        """Stages that have a marker, whole or not, in their order."""
        return [name for name in STAGES if self._path(name).exists()]

    def has(self, name: str) -> bool:
        """Whether a stage is marked finished.

        Raises:
            UserError: The marker is damaged.
        """
        if not self._path(name).exists():
            return False
        self._content(name)
        return True

    def model_of(self, name: str) -> str | None:
        """Fingerprint of the model that a finished stage was made with, if the run has one.

        Raises:
            UserError: The marker is damaged.
        """
        fingerprint: str | None = self._content(name)["model"]
        return fingerprint

    def write(self, name: str, model: str | None) -> None:
        """Mark a stage finished; its files are on disk before the marker is."""
        names = self._files_of(name)
        for file in names:
            sync(self.run / file)
        content = {
            "stage": name,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "after": [stage for stage in self.finished() if stage not in from_stage_on(name)],
            "model": model,
            "files": manifest_of(self.run, names),
        }
        self._path(name).parent.mkdir(exist_ok=True)
        write_text(self._path(name), sealed(content))

    def remove(self, name: str) -> None:
        """Take back a marker."""
        self._path(name).unlink(missing_ok=True)

    def require_none_after(self, name: str) -> None:
        """Refuse to run a stage whose result is the ground of stages that are marked finished.

        Raises:
            UserError: Its marker has been lost, and those of later stages have not.
        """
        for later in from_stage_on(name)[1:]:
            if self._path(later).exists() and name in self._content(later)["after"]:
                raise UserError(
                    f"{self._path(name)} is missing, though {later} was made after it. "
                    f"{self.remedy(name)}"
                )

    def require_intact(self, name: str, *only: str) -> None:
        """Refuse a finished stage of which a file is not as it was when the stage ended.

        Args:
            name: The stage.
            only: Files that are read now, by their names in the stage's folder. Default: all.

        Raises:
            UserError: A file is missing, truncated or altered, or the marker is.
        """
        manifest: dict[str, FileSum] = self._content(name)["files"]
        wanted = {f"{STAGES[name]}/{file}" for file in only} or manifest.keys()
        damage = damage_in(self.run, {file: manifest[file] for file in wanted})
        if damage is not None:
            raise UserError(f"{damage}. {self.remedy(name)}")

    def remedy(self, name: str) -> str:
        """What to do about a damaged stage, as a sentence."""
        marked = [stage for stage in self.finished() if stage in from_stage_on(name)] or [name]
        return (
            f"Delete {', '.join(marked)} in {self.run / _FOLDER} and repeat the command, which "
            "then runs these stages again."
        )

    def _content(self, name: str) -> dict[str, Any]:
        path = self._path(name)
        try:
            content = unsealed(path)
        except DamagedError as error:
            raise UserError(f"{error}. {self.remedy(name)}") from error
        if content.get("stage") != name:
            raise UserError(f"{path} is the marker of another stage. {self.remedy(name)}")
        return content

    def _files_of(self, name: str) -> list[str]:
        if name == _OWN_CHECKSUMS:
            return []
        if name in _RESULTS_OF_THE_STAGE:
            return [f"{STAGES[name]}/{file}" for file in _RESULTS_OF_THE_STAGE[name]]
        folder = self.run / STAGES[name]
        paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
        kept = [path for path in paths if path.parts[0] not in _NEVER_READ_AGAIN]
        return [f"{STAGES[name]}/{path.as_posix()}" for path in kept]

    def _path(self, name: str) -> Path:
        return self.run / _FOLDER / name
