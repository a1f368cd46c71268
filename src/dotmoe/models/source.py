"""Where a model is: a folder, a GGUF file, a name on the hub, or the model in the package."""

import os.path
import re
from pathlib import Path

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

from dotmoe.common.errors import UserError, nearest_beside, one_line
from dotmoe.common.files import expanded
from dotmoe.models.checkpoint import ADAPTER, require_checkpoint
from dotmoe.models.config import GGUF, is_gguf

EMBEDDED = "embedded"
"""Name of the checkpoint that is part of the package."""
# Some repositories hold the weights twice, the second time as consolidated* or in a subfolder.
_WANTED = ["*.json", "*.safetensors", "tokenizer*", "*.model", "merges.txt", "*.jinja"]
_DESCRIBING = ["config.json", ADAPTER, "tokenizer_config.json", "chat_template.*"]
_UNWANTED = ["consolidated*", "*/*[!a]"]  # additional_chat_templates/*.jinja ends in "a"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")


def checkpoint_folder(source: str, *, config_only: bool = False) -> Path:
    """Local folder of a checkpoint, given as a folder, hub name, GGUF file or `embedded`.

    A hub name may end in `@` and a branch, tag or commit. Missing files of a hub checkpoint are
    downloaded, with `config_only` only what describes a model and its chats; without a network,
    those in the cache are used.
    """
    if source == EMBEDDED:
        return Path(__file__).parent / "embedded"
    folder = expanded(source)
    if os.path.isdir(folder):
        return folder.resolve()
    if os.path.isfile(folder):
        if not is_gguf(folder):
            raise UserError(f"{source} is a file. Name the folder with config.json, or a *{GGUF}.")
        from dotmoe.models.from_gguf import gguf_checkpoint  # an optional package

        return gguf_checkpoint(folder, config_only=config_only)
    meant = nearest_beside(folder)
    if is_local(source):
        raise UserError(f"{source} does not exist.{meant} Name a checkpoint folder.")
    return _from_hub(source, meant, config_only=config_only)


def _from_hub(source: str, meant: str, *, config_only: bool) -> Path:
    """Folder of a hub checkpoint in the cache, downloaded if it can be; `meant` ends an error."""
    name, _, revision = source.partition("@")
    wanted = _DESCRIBING if config_only else _WANTED
    try:
        snapshot = snapshot_download(
            name, revision=revision or None, allow_patterns=wanted, ignore_patterns=_UNWANTED
        )
    except GatedRepoError as error:
        raise UserError(
            f"{source} is gated on the hub. Accept its terms there, then run `hf auth login`."
        ) from error
    except Exception as error:  # its errors, and those of its transports, have no common base
        is_offline = isinstance(error, LocalEntryNotFoundError)
        cached = _cached(name, revision) if is_offline else None
        if cached:
            return cached
        cause = "offline, and not in the cache" if is_offline else one_line(error)
        raise UserError(
            f"{source} is no local folder and cannot be fetched from the hub ({cause}). "
            f"Check the name and the network.{meant}"
        ) from error
    folder = Path(snapshot).resolve()
    wanted_file = "config.json" if config_only else "*.safetensors"
    if not any(folder.glob(wanted_file)):
        raise UserError(
            f"{source} in {folder} has no {wanted_file}. Name a model with config.json and "
            "*.safetensors (pickles are not read), or fetch it whole, with a network."
        )
    return folder


def at_revision(source: str, revision: str | None) -> str:
    """The name of a hub model at a commit, `org/name@commit`; `source` itself without a commit."""
    return source if revision is None else f"{source.partition('@')[0]}@{revision}"


def _cached(name: str, revision: str) -> Path | None:
    """Folder of the hub's cache with a whole checkpoint, though the hub has more files of it."""
    config = try_to_load_from_cache(name, "config.json", revision=revision or None)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent.resolve()
    try:
        require_checkpoint(folder)
    except UserError:
        return None
    return folder


def is_local(source: str) -> bool:
    """Whether `source` names something on this machine rather than on the hub."""
    is_path = source.startswith((".", "/", "~")) or is_gguf(Path(source)) or os.path.exists(source)
    return is_path or source == EMBEDDED or not _HUB_NAME.fullmatch(source)
