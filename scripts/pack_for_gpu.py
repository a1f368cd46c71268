"""Pack what the part `real` of benchmarks/gpu.py needs on a machine without network.

    python scripts/pack_for_gpu.py build/gpu --model MODEL.gguf --text TEXT.txt.gz

The folder receives a tar file in pieces, `part.00` and so on, of at most `--largest` MiB: model,
texts, questions, and the wheels of benchmarks/gpu_wheels.txt. There, after
`cat part.* | tar --extract --directory FILES`, the folder FILES is what `--files` takes.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

WHEELS = Path(__file__).parents[1] / "benchmarks/gpu_wheels.txt"
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for the pieces; it is emptied")
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file, or a folder")
    parser.add_argument("--text", type=Path, required=True, help="text to train on")
    for name in ("heldout", "humaneval", "gsm8k"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--largest", type=float, default=52, help="MiB of a piece")
    asked = parser.parse_args()
    with TemporaryDirectory() as scratch:
        files = Path(scratch) / "files"
        files.mkdir()
        if asked.model.is_dir():
            shutil.copytree(asked.model, files / "model")
        else:
            shutil.copy(asked.model, files / "model.gguf")
        for name in ("text", "heldout", "humaneval", "gsm8k"):
            file = getattr(asked, name)
            if file:
                # Suffixes say how to read it: .txt.gz
                shutil.copy(file, files / (name + "".join(file.suffixes[-2:])))
        fetch_wheels(files)
        pieces = written(files, asked.out, round(asked.largest * MIB))
    for piece in pieces:
        print(f"{piece} {piece.stat().st_size / MIB:.1f} MiB")


def fetch_wheels(folder: Path) -> None:
    """Fetch the wheels that travel, without what they require."""
    line = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    line += ["--no-deps", "--only-binary", ":all:", "--requirement", str(WHEELS)]
    subprocess.run([*line, "--dest", str(folder)], check=True)


def written(files: Path, out: Path, largest: int) -> list[Path]:
    """The pieces of a tar file of a folder, of at most `largest` bytes each."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    whole, pieces = out / "whole.tar", list[Path]()
    with tarfile.open(whole, "w") as tar:
        tar.add(files, arcname=".")
    with whole.open("rb") as source:
        while data := source.read(largest):
            pieces.append(out / f"part.{len(pieces):02d}")
            pieces[-1].write_bytes(data)
    whole.unlink()
    return pieces


if __name__ == "__main__":
    main()
