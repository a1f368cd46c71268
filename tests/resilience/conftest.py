"""Runs of a tiny model, finished and interrupted, each made once and then copied."""

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from dotmoe.cli import run
from dotmoe.config import RunConfig, from_json
from dotmoe.narration import Narrator
from dotmoe.pipeline import convert

OPTIONS = {
    "--expert-size": "8",
    "--steps": "6",
    "--batch-size": "2",
    "--seq-len": "32",
    "--lr": "1e-2",
    "--checkpoint-every": "2",
    "--calibration-tokens": "256",
    "--eval-tokens": "256",
    "--scale-tokens": "128",
    "--verify-tokens": "256",
}
TEXT = "\n".join(
    f"Line {i}: the {['cat', 'dog', 'crow'][i % 3]} ate {i * 7 % 13} figs." for i in range(400)
)


@dataclass(frozen=True)
class TinyRun:
    """A run folder and how it was made."""

    folder: Path
    model: Path
    text: Path
    options: dict[str, str] = field(default_factory=lambda: OPTIONS)

    def command(self, *extra):
        """The command line that makes the run, or goes on with it."""
        options = [word for option in self.options.items() for word in option]
        start = ["convert", str(self.model), str(self.folder), "--data", str(self.text)]
        return [*start, *options, *extra]

    def copied_to(self, folder):
        """The same run, elsewhere."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder)
        return replace(self, folder=folder)

    def with_options(self, folder, options):
        """Another run, with other options."""
        return replace(self, folder=folder, options={**self.options, **options})

    def files(self):
        """Paths of all files below the folder, as text."""
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return [path.relative_to(self.folder).as_posix() for path in files]

    def learned(self):
        """What is in every safetensors file, bit for bit. A header's order is not determined."""
        return {name: _tensors(self.folder / name) for name in self.files() if _holds_tensors(name)}

    def contents(self, *without):
        """Every file's bytes, by its path below the folder."""
        return {
            name: (self.folder / name).read_bytes() for name in self.files() if name not in without
        }


def _holds_tensors(name):
    return name.endswith(".safetensors")


def _tensors(path):
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    return metadata, {n: (t.dtype, t.numpy().tobytes()) for n, t in load_file(path).items()}


class StopsAtStep(Narrator):
    """Interrupts the run from outside, as Ctrl-C does, at an alignment step."""

    def __init__(self, step):
        super().__init__(quiet=True)
        self.step = step

    def bar(self, title):
        """A bar that interrupts."""
        return _Bar(self.step if title == "align" else None)


@dataclass
class _Bar:
    step: int | None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def __call__(self, done, total=0, note=""):
        if done == self.step:
            raise KeyboardInterrupt


@pytest.fixture(scope="session")
def new_run(tiny_dense, tmp_path_factory):
    """A run that has not been started."""
    root = tmp_path_factory.mktemp("resilience")
    (root / "text.txt").write_text(TEXT)
    return TinyRun(root / "run", tiny_dense("llama"), root / "text.txt")


@pytest.fixture(scope="session")
def finished(new_run, tmp_path_factory):
    """A run that went through without interruption."""
    made = TinyRun(tmp_path_factory.mktemp("finished") / "run", new_run.model, new_run.text)
    assert run(made.command()) == 0
    return made


@pytest.fixture(scope="session")
def interrupted(finished, tmp_path_factory):
    """The same run, interrupted after 5 of 6 steps, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    config = from_json(finished.folder / "config.json", RunConfig)
    with pytest.raises(KeyboardInterrupt):
        convert(replace(config, out=str(folder)), StopsAtStep(5))
    return TinyRun(folder, finished.model, finished.text)
