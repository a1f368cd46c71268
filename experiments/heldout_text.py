"""A short held-out text for measurements that score whole documents.

    python experiments/heldout_text.py OUT

Writes the first held-out files of the Python standard library that are neither very short nor very
long to OUT/heldout.jsonl, one per line, and their number to OUT/text.json.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from dotmoe.data.sources import stdlib_documents
from dotmoe.files import write_json
from dotmoe.run_folder import provenance


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much text to write, and where."""

    out: Annotated[Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Folder to write."""
    characters: int = 24_000
    """Characters to write, at least; the last file is written whole."""
    shortest: int = 4_000
    """Fewest characters of a file, so that it has more tokens than any window."""
    longest: int = 12_000
    """Most characters of a file."""


def main() -> None:
    settings = tyro.cli(Settings)
    texts: list[str] = []
    for text in stdlib_documents("heldout"):
        if sum(map(len, texts)) >= settings.characters:
            break
        if settings.shortest <= len(text) <= settings.longest:
            texts.append(text)
    settings.out.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (settings.out / "heldout.jsonl").write_text(lines, encoding="utf-8")
    record = {"origin": "measured", "documents": len(texts), "characters": sum(map(len, texts))}
    write_json(settings.out / "text.json", record | {"provenance": provenance(seed=0)})


if __name__ == "__main__":
    main()
