"""Task data from a local folder: which file holds which split of which harness task.

Nothing of a task is changed but where its rows come from: a YAML file includes the harness's own
definition and overrides its data source, which is the way the harness has for it. The same files
can be given to its own command line (`lm_eval --include_path`).
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dotmoe.errors import UserError

SUFFIXES = (".jsonl.gz", ".jsonl", ".json", ".json.gz")


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalTask:
    """Where the splits of a task lie below the folder; the first file that exists is taken."""

    definition: str
    """The harness's YAML of the task, below its folder of tasks."""
    scored: tuple[str, ...]
    """Splits that may be scored, the harness's choice first."""
    files: dict[str, tuple[str, ...]]
    """Paths without suffix, by split."""
    stand_ins: dict[str, str] = field(default_factory=dict)
    """What to say where such a file, or a later split of `scored`, is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalFiles:
    """Files found for one task."""

    files: dict[str, Path]
    """By split."""
    notes: tuple[str, ...]
    """How they differ from the official data."""

    def override(self) -> dict[str, Any]:
        """What a task's definition gets in place of its hub data set."""
        splits: dict[str, str | None] = {
            f"{split}_split": None for split in ("training", "validation", "test")
        }
        for split in self.files:
            splits["training_split" if split == "train" else f"{split}_split"] = split
        return {
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {s: str(path) for s, path in self.files.items()}},
            **splits,
        }

    def digests(self) -> dict[str, dict[str, str]]:
        """Name and SHA-256 of each file, by split."""
        return {
            split: {
                "file": f"{path.parent.name}/{path.name}",
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for split, path in self.files.items()
        }


def _three(folder: str) -> dict[str, tuple[str, ...]]:
    return {split: (f"{folder}/{split}",) for split in ("train", "validation", "test")}


def _two(folder: str) -> dict[str, tuple[str, ...]]:
    return {split: (f"{folder}/{split}",) for split in ("train", "validation")}


LOCAL_TASKS = {
    "boolq": LocalTask(
        definition="super_glue/boolq/default.yaml", scored=("validation",), files=_two("boolq")
    ),
    "sciq": LocalTask(
        definition="sciq/sciq.yaml",
        scored=("test", "validation"),
        files=_three("sciq"),
        stand_ins={
            "validation": "scored on the validation split, since there is no sciq/test: the "
            "official number is of the test split"
        },
    ),
    "piqa": LocalTask(definition="piqa/piqa.yaml", scored=("validation",), files=_two("piqa")),
    "winogrande": LocalTask(
        definition="winogrande/default.yaml", scored=("validation",), files=_two("winogrande_xl")
    ),
    "arc_challenge": LocalTask(
        definition="arc/arc_challenge.yaml", scored=("test",), files=_three("ai2_arc/ARC-Challenge")
    ),
    "arc_easy": LocalTask(
        definition="arc/arc_easy.yaml", scored=("test",), files=_three("ai2_arc/ARC-Easy")
    ),
    "hellaswag": LocalTask(
        definition="hellaswag/hellaswag.yaml",
        scored=("validation",),
        files={
            "train": ("hellaswag/train", "hellaswag/train_fewshot_11"),
            "validation": ("hellaswag/validation",),
        },
        stand_ins={
            "hellaswag/train_fewshot_11": "solved examples are drawn from 11 rows of the training "
            "split, not from all 39,905, so that prompts differ from the official ones"
        },
    ),
    "wikitext": LocalTask(
        definition="wikitext/wikitext.yaml",
        scored=("test",),
        files={"test": ("wikitext/test", "wikitext2/test_documents")},
    ),
}
"""The one place that knows local files, by the name of the harness's task."""


def local_files(folder: Path, task: str, shots: int) -> LocalFiles:
    """Files of one task.

    Args:
        folder: What `--task-data` names.
        task: Name of the harness's task.
        shots: Solved examples; above 0 a training split is needed.

    Raises:
        UserError: The task is not in `LOCAL_TASKS`, or a file that it needs is not there.
    """
    if task not in LOCAL_TASKS:
        raise UserError(
            f"{task} has no place in a local folder; {', '.join(LOCAL_TASKS)} have. Leave out "
            "--task-data to take it from the hub."
        )
    known = LOCAL_TASKS[task]
    found = {
        split: path
        for split, names in known.files.items()
        for path in [_first(folder, names)]
        if path is not None
    }
    scored = next((split for split in known.scored if split in found), None)
    if scored is None:
        raise _missing(folder, task, known.files[known.scored[0]])
    if shots > 0 and "train" not in found:
        raise _missing(folder, task, known.files.get("train", (f"{task}/train",)))
    kept = {split: path for split, path in found.items() if split in ("train", scored)}
    taken = [scored] if scored != known.scored[0] else []
    taken += [name for names in known.files.values() for name in names if _is(kept, folder, name)]
    notes = tuple(
        known.stand_ins[name]
        for name in taken
        if name in known.stand_ins and (shots > 0 or "/" not in name)
    )
    return LocalFiles(files=kept, notes=notes)


def write_definition(folder: Path, task: str, harness_yaml: Path, files: LocalFiles) -> None:
    """Write the YAML of a task that reads local files; JSON is YAML."""
    definition = {"include": str(harness_yaml), "task": task, "tag": [], **files.override()}
    (folder / f"{task}.yaml").write_text(json.dumps(definition, indent=2), encoding="utf-8")


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    paths = (folder / f"{name}{suffix}" for name in names for suffix in SUFFIXES)
    return next((path.resolve() for path in paths if path.is_file()), None)


def _is(kept: dict[str, Path], folder: Path, name: str) -> bool:
    return _first(folder, (name,)) in kept.values()


def _missing(folder: Path, task: str, names: tuple[str, ...]) -> UserError:
    wanted = " or ".join(f"{name}{SUFFIXES[0]}" for name in names)
    return UserError(
        f"{task} needs {wanted} below {folder} (also as {', '.join(SUFFIXES[1:])}), and it is not "
        "there. Put it there, or leave out --task-data to take it from the hub."
    )
