"""A checkpoint folder: found by its name, downloaded if need be, its files checked."""

import hashlib
import re
from importlib import resources
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError
from safetensors import SafetensorError, safe_open

from dotmoe.errors import UserError, nearest, one_line
from dotmoe.files import read_json

EMBEDDED = "embedded"
"""Name of the checkpoint that the package carries."""
GGUF = ".gguf"
"""Ending of the files that `from_gguf` turns into a checkpoint folder."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""One of these is in every folder with a tokenizer."""
# Some hubs hold the weights twice, the second time as consolidated* or in a subfolder.
_WANTED = ["*.json", "*.safetensors", "tokenizer*", "*.model", "merges.txt", "*.jinja"]
_UNWANTED = ["consolidated*", "*/*"]
_END_BYTES = 1 << 20
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def checkpoint_folder(source: str, *, config_only: bool = False) -> Path:
    """Local folder of a checkpoint; what a hub name lacks is downloaded.

    Args:
        source: Folder, hub name, GGUF file, or `embedded`.
        config_only: Download, or read of a GGUF, no more than config.json.

    Raises:
        UserError: Nothing there under that name.
    """
    if source == EMBEDDED:
        return Path(str(resources.files("dotmoe"))) / "embedded"
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.is_file() and folder.suffix == GGUF:
        from dotmoe.checkpoint.from_gguf import gguf_checkpoint

        return gguf_checkpoint(folder, config_only=config_only)
    if folder.is_file():
        raise UserError(
            f"{source} is a file. Name the folder that holds config.json beside it, or a *{GGUF}."
        )
    beside = [str(item) for item in folder.parent.iterdir()] if folder.parent.is_dir() else []
    meant = nearest(str(folder), beside)
    if is_local(source):
        raise UserError(f"{source} does not exist.{meant} Name a checkpoint folder.")
    try:
        wanted = ["config.json"] if config_only else _WANTED
        found = snapshot_download(source, allow_patterns=wanted, ignore_patterns=_UNWANTED)
    except GatedRepoError as error:
        raise UserError(
            f"{source} is gated on the hub. Accept its terms there, then run `hf auth login`."
        ) from error
    except (OSError, HFValidationError) as error:
        raise UserError(
            f"{source} is no folder here and cannot be fetched from the hub ({one_line(error)}). "
            f"Check the name and the network.{meant}"
        ) from error
    return Path(found).resolve()


def is_local(source: str) -> bool:
    """Whether `source` means something on this machine rather than on the hub."""
    looks_like_path = source.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(source)
    looks_like_path |= source.endswith(GGUF)
    return source == EMBEDDED or looks_like_path or Path(source).exists()


def tensor_files(folder: Path) -> dict[str, Path]:
    """Checkpoint tensor name -> safetensors file, from the files' own headers.

    Raises:
        UserError: No safetensors, a shard missing or damaged, or a tensor not in its shard.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return dict.fromkeys(_tensor_names(single), single)
    if not index.is_file():
        old = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))
        if old:
            raise UserError(
                f"{folder} holds weights only as {old[0].name}, and pickles are not read. Load "
                "them with Transformers, then model.save_pretrained(folder)."
            )
        raise UserError(f"{folder} holds no {single.name} and no {index.name}. Fetch them.")
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise UserError(f"{index} has no weight_map. Download it again.")
    shards = sorted(set(shard_of.values()))
    for shard in shards:
        if not (folder / shard).is_file():
            raise UserError(
                f"{shard} is named in {index} but missing, one of {len(shards)} shards. "
                "Download it again."
            )
    files = {name: folder / shard for shard in shards for name in _tensor_names(folder / shard)}
    for name, shard in shard_of.items():
        if files.get(name) != folder / shard:
            raise UserError(f"{name} is not in {folder / shard}, where {index.name} puts it.")
    return files


def _tensor_names(path: Path) -> list[str]:
    try:
        with path.open("rb") as raw:
            is_pointer = raw.read(40).startswith(b"version https://git-lfs")
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except SafetensorError as error:
        cause = "a Git LFS pointer; git lfs pull gets the file" if is_pointer else one_line(error)
        raise UserError(f"{path} is no whole safetensors file ({cause}). Get it again.") from error


def require_tokenizer(folder: Path) -> list[str]:
    """Refuse a folder without tokenizer files; returns their names."""
    present = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        raise UserError(f"{folder} holds no {' or '.join(TOKENIZER_FILES)}. Copy the tokenizer.")
    return present


def require_checkpoint(folder: Path) -> None:
    """Refuse a folder that stock Transformers could not load, before it tries.

    Raises:
        UserError: Config, weights or tokenizer are missing or damaged.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no config.json. Name a model folder or a finished run.")
    if not read_json(folder / "config.json").get("model_type"):
        raise UserError(f"{folder / 'config.json'} names no model_type. Name a model folder.")
    tensor_files(folder)
    require_tokenizer(folder)


def fingerprint(folder: Path) -> str:
    """Tells checkpoints apart: config, tokenizer, size and both ends of each weight file; cheap."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_END_BYTES))
            file.seek(max(0, size - _END_BYTES))
            digest.update(file.read(_END_BYTES))
    return digest.hexdigest()
