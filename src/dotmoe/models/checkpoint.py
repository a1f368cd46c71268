"""Checkpoint folders: find one by name, download it if needed, check it, read its tensors."""

import hashlib
import os.path
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dotmoe.common.errors import UserError, nearest, one_line
from dotmoe.common.files import Values, read_json
from dotmoe.models.family import DenseModel, TensorPart

EMBEDDED = "embedded"
"""Name of the checkpoint that is part of the package."""
GGUF = ".gguf"
CHANGED = "weights.safetensors"
"""File with the tensors that a repair has changed in one layer."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""One of these is in every folder with a tokenizer."""
# Some repositories hold the weights twice, the second time as consolidated* or in a subfolder.
_WANTED = ["*.json", "*.safetensors", "tokenizer*", "*.model", "merges.txt", "*.jinja"]
_UNWANTED = ["consolidated*", "*/*[!a]"]  # additional_chat_templates/*.jinja ends in "a"
_END_BYTES = 1 << 20
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_MOST_LAYERS = 2_000
"""Far above any model, and still built in seconds."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Floating-point dtypes by their name in a safetensors header."""
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
INDEX = "model.safetensors.index.json"
"""File that records which file of a checkpoint holds which tensor, if it has several."""
TEXT_OF_WRAPPER = {
    r"^(?:model\.)?language_model\.(?:model\.)?(?!lm_head)": "model.",
    r"^(?:model\.)?language_model\.(?=lm_head)": "",
}
"""Prefixes that models of more than text give to the tensors of the text model in them."""
_DRAFTS = re.compile(r"mtp\.")
_AROUND_TEXT = re.compile(r"(?!model\.(embed_tokens|layers|norm)\.|lm_head\.)")


def checkpoint_folder(source: str, *, config_only: bool = False) -> Path:
    """Local folder of a checkpoint, given as a folder, hub name, GGUF file or `embedded`.

    A hub name may end in `@` and a branch, tag or commit. Missing files of a hub checkpoint are
    downloaded, with `config_only` only config.json; without a network, those in the cache are used.
    """
    if source == EMBEDDED:
        return Path(__file__).parent / "embedded"
    # Methods of `Path` raise where there is no such user, or the name is too long for a file.
    folder = Path(os.path.expanduser(source))
    if os.path.isdir(folder):
        return folder.resolve()
    if os.path.isfile(folder):
        if folder.suffix != GGUF:
            raise UserError(f"{source} is a file. Name the folder with config.json, or a *{GGUF}.")
        from dotmoe.models.from_gguf import gguf_checkpoint

        return gguf_checkpoint(folder, config_only=config_only)
    beside = folder.parent.iterdir() if os.path.isdir(folder.parent) else ()
    meant = nearest(str(folder), map(str, beside))
    if is_local(source):
        raise UserError(f"{source} does not exist.{meant} Name a checkpoint folder.")
    name, _, revision = source.partition("@")
    wanted = ["config.json"] if config_only else _WANTED
    try:
        snapshot = snapshot_download(
            name, revision=revision or None, allow_patterns=wanted, ignore_patterns=_UNWANTED
        )
    except GatedRepoError as error:
        raise UserError(
            f"{source} is gated on the hub. Accept its terms there, then run `hf auth login`."
        ) from error
    except Exception as error:  # its errors, and those of its transports, have no common base
        if isinstance(error, LocalEntryNotFoundError) and (cached := _cached(name, revision)):
            return cached
        is_offline = isinstance(error, LocalEntryNotFoundError)
        cause = "offline, and not in the cache" if is_offline else one_line(error)
        raise UserError(
            f"{source} is no local folder and cannot be fetched from the hub ({cause}). "
            f"Check the name and the network.{meant}"
        ) from error
    folder = Path(snapshot).resolve()
    missing = "config.json" if config_only else "*.safetensors"
    if not any(folder.glob(missing)):
        raise UserError(
            f"{source} in {folder} has no {missing}. Name a model with config.json and "
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
    with suppress(UserError):
        require_checkpoint(folder)
        return folder
    return None


def is_local(source: str) -> bool:
    """Whether `source` names something on this machine rather than on the hub."""
    is_path = source.startswith((".", "/", "~")) or source.endswith(GGUF) or os.path.exists(source)
    return is_path or source == EMBEDDED or not _HUB_NAME.fullmatch(source)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Map tensor names to safetensors files, from their headers; refuses a damaged file."""
    single, index = folder / "model.safetensors", folder / INDEX
    if single.is_file():
        return dict.fromkeys(_tensor_names(single), single)
    if not index.is_file():
        raise UserError(
            f"{folder} holds no {single.name} and no {index.name}, and pickles are not read. "
            "Fetch them, or save the model anew with model.save_pretrained(folder)."
        )
    shard_of = read_json(index).get("weight_map")
    is_map = isinstance(shard_of, dict) and all(isinstance(each, str) for each in shard_of.values())
    if not shard_of or not is_map:
        raise UserError(f"{index} has no weight_map. Download it again.")
    shards = sorted({folder / shard for shard in shard_of.values()})
    return {name: shard for shard in shards for name in _tensor_names(shard)}


def text_name(stored: str) -> str:
    """Name of a tensor of a text model, without the prefix of a wrapper around it."""
    for prefix, plain in TEXT_OF_WRAPPER.items():
        stored = re.sub(prefix, plain, stored)
    return stored


def _tensor_names(path: Path) -> list[str]:
    with _opened(path) as file:
        return list(file.keys())


def require_tokenizer(folder: Path) -> list[str]:
    """Names of the tokenizer files in a folder; raises `UserError` if there are none."""
    present = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        raise UserError(f"{folder} holds no {' or '.join(TOKENIZER_FILES)}. Copy the tokenizer.")
    return present


def stored_config(folder: Path) -> Values:
    """Content of a model's config.json; `UserError` if it is missing, or of another kind."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no config.json. Name a model folder or a finished run.")
    values = read_json(path)
    if not values.get("model_type"):
        is_run = (folder / "manifest.json").is_file()
        what = "is of a dotmoe run, not of a model" if is_run else "names no model_type"
        raise UserError(f"{path} {what}. Name the folder of a model.")
    require_layers(values, path)
    return values


def require_layers(values: Values, path: Path) -> None:
    """Refuse a config, of a model or of the text model in it, with absurdly many layers."""
    text = values.get("text_config")
    for each in (values, text if isinstance(text, dict) else {}):
        for key in _LAYER_COUNTS:
            count = each.get(key)
            if isinstance(count, int) and count > _MOST_LAYERS:
                raise UserError(
                    f"{path} has {key} {count:,}, and no model has more than {_MOST_LAYERS:,}. "
                    "Compare it with the original checkpoint's."
                )


def require_checkpoint(folder: Path) -> None:
    """Refuse a folder whose config, weights or tokenizer are missing or damaged."""
    stored_config(folder)
    tensor_files(folder)
    require_tokenizer(folder)


def fingerprint(folder: Path) -> str:
    """Cheap hash of a checkpoint: config, tokenizer, size and both ends of each weight file."""
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


class Tensors:
    """The tensors of a safetensors checkpoint by name, read on demand.

    In every family a tensor has its name in LLaMA's form and its own name; a tied matrix has both
    its names; those of a base model get the prefix `model.`, as Transformers gives it when it
    loads one; those of a text model in a wrapper lose its prefix. The last tensor read is cached,
    so consecutive slices of one matrix cost one read.
    """

    def __init__(
        self, folder: Path, *, tied: bool, part_of: Callable[[str], TensorPart] = TensorPart
    ) -> None:
        """Read the headers, as `tensor_files` does; `part_of` maps names to stored tensors."""
        self.folder = folder
        self._part_of = part_of
        files = tensor_files(folder)
        prefix = "model." if EMBEDDING.removeprefix("model.") in files else ""
        named = {text_name(name): (path, name) for name, path in files.items()}
        """Names of the tensors around a text model: vision tower, projector, Qwen3.5's drafts."""
        wrapped = any(name != place[1] for name, place in named.items())
        self.left_out = sorted(filter((_AROUND_TEXT if wrapped else _DRAFTS).match, named))
        self._place = {
            (name if name == HEAD else prefix + name): place
            for name, place in named.items()
            if name not in self.left_out
        }
        self.names = set(self._place)
        """Names of the tensors as stored, without aliases."""
        stored = EMBEDDING if EMBEDDING in self.names else HEAD
        self._alias = {EMBEDDING: stored, HEAD: stored} if tied else {}
        self._last: tuple[str, Tensor] | None = None

    @classmethod
    def of(cls, dense: DenseModel) -> "Tensors":
        """The tensors of a dense model's checkpoint; refuses one without its head."""
        config, family, folder = dense.config, dense.family, dense.folder
        tied = bool(config.tie_word_embeddings)
        tensors = cls(folder, tied=tied, part_of=lambda name: family.stored(config, name))
        for path in dense.changes.glob(f"*/{CHANGED}") if dense.changes else ():
            tensors._place |= {name: (path, name) for name in _tensor_names(path)}
        if not tied and EMBEDDING in tensors.names and HEAD not in tensors.names:
            raise UserError(
                f"{folder} holds no {HEAD}: it is a base model, saved without the head. Load it "
                "whole with AutoModelForCausalLM, then model.save_pretrained(folder)."
            )
        return tensors

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the FFN weights, which are most of a checkpoint."""
        return self.describe("model.layers.0.mlp.gate_proj.weight")[1]

    def stored_name(self, name: str) -> str:
        """Name of the stored tensor that contains `name`; raises `UserError` if it is missing."""
        part = self._part_of(name).stored
        stored = self._alias.get(part, part)
        if stored not in self._place:
            raise UserError(
                f"{name} is missing from the safetensors files of {self.folder}. Fetch them again."
            )
        return stored

    def describe(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a tensor, from the file's header alone."""
        stored = self.stored_name(name)
        path, key = self._place[stored]
        with _opened(path) as file:
            view = file.get_slice(key)
            shape, dtype = tuple(view.get_shape()), view.get_dtype()
        if dtype not in DTYPES:
            raise UserError(
                f"{name} in {self.folder} is stored as {dtype}, but weights must be one of "
                f"{', '.join(DTYPES)}. Choose a checkpoint that is not quantised."
            )
        rows = self._part_of(name).rows
        return shape if rows is None else (rows[1] - rows[0], *shape[1:]), DTYPES[dtype]

    def read(self, name: str) -> Tensor:
        """Read a tensor to the CPU, in the dtype that it is stored in."""
        stored, rows = self.stored_name(name), self._part_of(name).rows
        if self._last is None or self._last[0] != stored:
            self._last = None  # free the old tensor before the new one is read
            path, key = self._place[stored]
            with _opened(path) as file:
                self._last = (stored, file.get_tensor(key))
        whole = self._last[1]
        return whole if rows is None else whole[slice(*rows)]

    def read_all(self, stored: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Read tensors by their stored names, opening each file once; yields names and tensors."""
        places = sorted((*self._place[name], name) for name in stored)
        for path, group in groupby(places, key=lambda place: place[0]):
            with _opened(path) as file:
                for _, key, name in group:
                    yield name, file.get_tensor(key)

    def read_rows(self, name: str, rows: slice) -> Tensor:
        """Read only some rows of a tensor that is stored under its own name or an alias."""
        path, key = self._place[self.stored_name(name)]
        with _opened(path) as file:
            part: Tensor = file.get_slice(key)[rows]
        return part

    def forget(self) -> None:
        """Drop the cached tensor."""
        self._last = None

    def require_shapes(self, model: nn.Module) -> None:
        """Refuse a checkpoint if a model's parameter is missing, of another shape, or not tied."""
        for name, parameter in model.named_parameters():
            shape, _ = self.describe(name)
            if shape != tuple(parameter.shape):
                raise UserError(
                    f"{name} has shape {shape} in {self.folder}, but its config.json requires "
                    f"{tuple(parameter.shape)}. Fix the config."
                )
        # Transformers would run a head that is stored beside the embedding and differs from it.
        if self._alias and {EMBEDDING, HEAD} <= self.names:
            (_, one), (_, other) = self.read_all((EMBEDDING, HEAD))
            if not torch.equal(one.to(other.dtype), other):
                raise UserError(
                    f"{HEAD} and {EMBEDDING} in {self.folder} differ, but its config.json ties "
                    "them. Set tie_word_embeddings to false there."
                )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file; anew for each tensor, because what is read of a mapped file counts as memory."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}). Get it again.") from error
    except SafetensorError as error:
        with path.open("rb") as raw:
            is_pointer = raw.read(40).startswith(b"version https://git-lfs")
        cause = "a Git LFS pointer; git lfs pull gets the file" if is_pointer else one_line(error)
        raise UserError(f"{path} is no valid safetensors file ({cause}). Get it again.") from error
