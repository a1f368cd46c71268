"""RunFolder: what of a run is on disk, and what of it is finished."""

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from dotmoe.config import AnyRunConfig, Config, as_values, command_in, from_json, identity
from dotmoe.distributed import is_first
from dotmoe.errors import UserError
from dotmoe.run_folder.lock import LOCK, locked
from dotmoe.run_folder.marks import Marks
from dotmoe.run_folder.stages import STAGES, from_stage_on
from dotmoe.run_folder.whole_files import write_text
from dotmoe.sealed_json import SEAL, DamagedError, any_object, require_seal, sealed

_CONFIG = "config.json"
_STARTED_WITH = "checkpoints"


class RunFolder:
    """A run on disk. Opening it again with the same config goes on where it stopped.

    A file of a finished stage is to be read through `intact`, which refuses damaged ones.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._marks = Marks(path)
        self._model: str | None = None
        self._compared: set[str] = set()

    @classmethod
    def open(cls, config: AnyRunConfig) -> "RunFolder":
        """Make the folder, or take up an unfinished run of the same config.

        Raises:
            UserError: Something else is in the way, or the folder cannot be made.
        """
        cls.require_usable(config)
        path = Path(config.out)
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_text(path / _CONFIG, sealed(as_values(config)))
        except (PermissionError, FileNotFoundError, NotADirectoryError) as error:
            _remove_if_empty(path)
            raise UserError(
                f"{path} cannot be made ({error.strerror}: {error.filename}). Choose another "
                "folder, or get permission."
            ) from error
        except BaseException:
            _remove_if_empty(path)
            raise
        return cls(path)

    @staticmethod
    def require_usable(config: AnyRunConfig) -> None:
        """Refuse a folder that `open` would refuse; touches nothing.

        Raises:
            UserError: Something else is in the way.
        """
        path = Path(config.out)
        stored = path / _CONFIG
        if stored.exists():
            _require_same_run(stored, config)
        elif path.exists() and (not path.is_dir() or _holds_more_than_a_start(path)):
            raise UserError(
                f"{path} is in the way: it exists and is no dotmoe run. Choose another folder."
            )

    def alone(self) -> AbstractContextManager[None]:
        """Keep other processes out of the folder; the system takes the lock back after any end.

        Raises:
            UserError: Another process is at work in the folder.
        """
        return locked(self.path)

    def config(self, cls: type[Config]) -> Config:
        """The config that the run was started with.

        Raises:
            UserError: It is missing, damaged, or of another command.
        """
        _require_whole(self.path / _CONFIG)
        return from_json(self.path / _CONFIG, cls)

    def require_model(self, fingerprint: str) -> None:
        """Refuse to go on with another model than the finished stages were made with.

        Raises:
            UserError: The model under that name has changed since.
        """
        self._model = fingerprint
        for name in self._marks.finished():
            if self._marks.model_of(name) not in (fingerprint, None):
                raise UserError(
                    f"{self.path} was started with another model of that name: its files have "
                    "changed since. Restore them, or choose another folder."
                )

    def stage(self, name: str) -> Path:
        """Folder of a stage, made if need be."""
        folder = self.path / STAGES[name]
        folder.mkdir(exist_ok=True)
        return folder

    def is_finished(self, name: str) -> bool:
        """Whether a stage ran to its end; anything else in its folder is not to be read.

        Raises:
            UserError: Its finish marker is damaged.
        """
        return self._marks.has(name)

    def intact(self, name: str, *only: str) -> Path:
        """Folder of a finished stage, after comparing its files with their checksums.

        That is done once: what this object has compared or finished itself costs no more time. An
        export has checksums of its own, see `dotmoe.export.require_intact`.

        Args:
            name: The stage.
            only: Files that are read now; others cost no time. Default: all that are ever read.

        Raises:
            UserError: A file is missing, truncated or altered since the stage ended.
        """
        if name not in self._compared:
            self._marks.require_intact(name, *only)
        if not only:
            self._compared.add(name)
        return self.path / STAGES[name]

    @contextmanager
    def finishing(self, name: str) -> Iterator[Path]:
        """Run a stage: gives its folder; marks it finished if the block ends without error.

        What an earlier run left in the folders of later stages is removed then, since it was made
        from something else.

        Raises:
            UserError: The marker of this stage has been lost, but not those of stages after it.
        """
        self._marks.require_none_after(name)
        self._marks.remove(name)
        yield self.stage(name)
        if is_first():
            for later in from_stage_on(name)[1:]:
                self.clear(later)
            self._marks.write(name, self._model)
            self._compared.add(name)

    def clear(self, name: str) -> None:
        """Remove what an unfinished stage left behind.

        Raises:
            UserError: Its marker has been lost, and those of stages made after it have not.
        """
        self._marks.require_none_after(name)
        shutil.rmtree(self.path / STAGES[name], ignore_errors=True)

    def discard_if_unstarted(self) -> None:
        """Remove the folder of a run that has nothing to go on from: bad input leaves nothing."""
        begun = [name for name in STAGES if (self.path / STAGES[name]).exists()]
        saved = any((self.path / STAGES[name] / _STARTED_WITH).exists() for name in begun)
        if not self._marks.finished() and len(begun) < 2 and not saved:
            shutil.rmtree(self.path, ignore_errors=True)


def _require_same_run(stored: Path, config: AnyRunConfig) -> None:
    _require_whole(stored)
    command = command_in(stored)
    if command != config.command:
        raise UserError(
            f"{stored.parent} holds a run of dotmoe {command}, not of dotmoe {config.command}. "
            "Choose another folder."
        )
    if identity(from_json(stored, type(config))) != identity(config):
        raise UserError(
            f"{stored.parent} holds a run with another config. Choose another folder, repeat that "
            f"run with --config {stored}, or delete the folder."
        )


def _require_whole(stored: Path) -> None:
    try:
        values = any_object(stored)
        if SEAL in values:  # runs of earlier versions have none
            require_seal(stored, values)
    except DamagedError as error:
        raise UserError(
            f"{error}. It says what the run in {stored.parent} is: restore it, or choose another "
            "folder."
        ) from error


def _holds_more_than_a_start(path: Path) -> bool:
    """Whether there is anything that a process killed while opening the folder would not leave."""
    return any(item.name not in (LOCK, f".{_CONFIG}.partial") for item in path.iterdir())


def _remove_if_empty(path: Path) -> None:
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()
