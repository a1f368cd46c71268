"""Checkpoint folders: what must be in one, and its tensors, read by name."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dotmoe.common.errors import UserError, one_line
from dotmoe.common.files import Values, read_json
from dotmoe.models.config import is_gguf
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.family import TensorPart

ADAPTER = "adapter_config.json"
CHANGED = "weights.safetensors"
"""File with the tensors that a repair has changed in one layer."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""One of these is in every folder with a tokenizer."""
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_MOST_LAYERS = 2_000
"""Far above any model, and still built in seconds."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Floating-point dtypes by their name in a safetensors header."""
_BASE_EMBEDDING = "embed_tokens.weight"
EMBEDDING = f"model.{_BASE_EMBEDDING}"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
INDEX = "model.safetensors.index.json"
"""File that records which file of a checkpoint holds which tensor, if it has several."""
TEXT_OF_WRAPPER = {
    r"^(?:model\.)?language_model\.(?:model\.)?(?!lm_head)": "model.",
    r"^(?:model\.)?language_model\.(?=lm_head)": "",
}
"""Prefixes that models of more than text give to the tensors of the text model in them."""
_WRAPPERS = re.compile(
    r"(?:(?<=\.)|^)(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
"""Modules that torch.compile, DDP, FSDP and activation checkpointing put around others."""
_LORA = re.compile(r"lora_|\.base_layer\.|modules_to_save\.")
_IN_LAYER = re.compile(r"(model\.layers\.)\d+(\..*)")
_DRAFTS = re.compile(r"mtp\.")
_AROUND_TEXT = re.compile(r"(?!model\.(embed_tokens|layers|norm)\.|lm_head\.)")


def dtype_name(dtype: torch.dtype) -> str:
    """Short name of a dtype: `bfloat16`, not `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def tensor_files(folder: Path) -> dict[str, Path]:
    """Map tensor names to safetensors files, from their headers; refuses a damaged file."""
    single = folder / "model.safetensors"
    index = folder / INDEX
    _require_one_of(folder, single, index)
    if single.is_file():
        return dict.fromkeys(_tensor_names(single), single)
    shard_of = _weight_map(index)
    held_in = dict[str, list[Path]]()
    for shard in sorted(set(shard_of.values())):
        for name in _tensor_names(folder / shard):
            held_in.setdefault(name, []).append(folder / shard)
    file_of = dict[str, Path]()
    for name, (first, *others) in held_in.items():
        for other in others:
            _require_equal(name, first, other)
        file_of[name] = folder / shard_of[name] if name in shard_of else first
        if file_of[name] not in (first, *others):
            raise UserError(
                f"{index} says that {name} is in {shard_of[name]}, but it is in {first.name}. "
                "Correct the index, or download it again."
            )
    return file_of


def _weight_map(index: Path) -> dict[str, str]:
    """File name of each tensor by an index; refuses one that names files which are not there."""
    shard_of = read_json(index).get("weight_map")
    is_map = isinstance(shard_of, dict) and all(isinstance(each, str) for each in shard_of.values())
    if not shard_of or not is_map:
        raise UserError(f"{index} has no weight_map. Download it again.")
    for shard, name in {shard: name for name, shard in shard_of.items()}.items():
        if not (index.parent / shard).is_file():
            raise UserError(
                f"{index} says that {name} is in {shard}, but there is no such file. Download the "
                "file, or else the index, again."
            )
    return cast(dict[str, str], shard_of)


def missing(name: str, folder: Path) -> str:
    """What is wrong if a tensor of the text model is not stored; names the shard of an index."""
    index = folder / INDEX
    shard_of = _weight_map(index) if index.is_file() else {}
    for listed, shard in shard_of.items():
        plain = _text_name(_WRAPPERS.sub("", listed))
        if plain.removeprefix("model.") == name.removeprefix("model."):
            return f"{index} says that {listed} is in {shard}, but it is in none of the files"
    return f"{name} is missing from the safetensors files of {folder}"


def _require_one_of(folder: Path, single: Path, index: Path) -> None:
    """Refuse a folder with weights neither whole nor in shards, or with both."""
    if single.is_file() and index.is_file():
        raise UserError(
            f"{folder} holds {single.name} and {index.name}, of which Transformers reads the first "
            "and vLLM the second. Delete the one that is not the model's."
        )
    if single.is_file() or index.is_file():
        return
    if files := _gguf_files(folder):
        raise UserError(f"{folder} holds no {single.name}, but {files[0]}. Name that file.")
    raise UserError(
        f"{folder} holds no {single.name} and no {index.name}, and pickles are not read. "
        "Fetch them, or save the model anew with model.save_pretrained(folder)."
    )


def _require_equal(name: str, path: Path, other: Path) -> None:
    """Refuse two different tensors of one name: readers would take one or the other."""
    with _opened(path) as file, _opened(other) as second:
        one, two = file.get_tensor(name), second.get_tensor(name)
    if one.shape != two.shape or not torch.equal(one, two.to(one.dtype)):
        raise UserError(
            f"{name} is stored twice, in {path} and in {other.name}, with other values. Delete the "
            f"copy that {INDEX} does not name, or download the checkpoint again."
        )


def plain_names(stored: Iterable[str]) -> dict[str, str]:
    """Names of tensors as the text model has them, by their stored names.

    They lose what training tools and models of more than text put before them. Raises `UserError`
    if that is ambiguous.
    """
    plain = {name: _text_name(_WRAPPERS.sub("", name)) for name in stored}
    embeddings = [name for name in plain.values() if name.endswith(_BASE_EMBEDDING)]
    if len(embeddings) == 1 and embeddings[0] not in (EMBEDDING, _BASE_EMBEDDING):
        prefix = embeddings[0].removesuffix(_BASE_EMBEDDING).removesuffix("model.")
        others = sorted(n for n in plain.values() if n != HEAD and not n.startswith(prefix))
        if others:
            raise UserError(
                f"{embeddings[0]} begins with {prefix!r}, but {others[0]} does not, so it is not "
                "clear which tensors are the model's. Save the language model alone, with its "
                "save_pretrained(folder)."
            )
        plain = {name: own.removeprefix(prefix) for name, own in plain.items()}
    stored_as = dict[str, str]()
    for name, own in plain.items():
        if own in stored_as:
            raise UserError(
                f"{stored_as[own]} and {name} are both {own} of the model. Save the model anew, "
                "without what was wrapped around it for training."
            )
        stored_as[own] = name
    return plain


def _text_name(stored: str) -> str:
    """Name of a tensor of a text model, without the prefix of a model of more than text."""
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
    if (folder / ADAPTER).is_file():
        raise UserError(
            f"{folder} holds an adapter ({ADAPTER}), and dotmoe applies none. Merge it into its "
            "base model with peft (merge_and_unload, then save_pretrained), and name that folder."
        )
    if not path.is_file():
        if files := _gguf_files(folder):
            raise UserError(f"{folder} holds no config.json, but {files[0]}. Name that file.")
        raise UserError(f"{folder} holds no config.json. Name a model folder or a finished run.")
    values = read_json(path)
    if not values.get("model_type"):
        if (folder / "manifest.json").is_file():
            raise UserError(
                f"{folder} is a dotmoe run, not a model. Name its 5_export, the model; if it has "
                "none yet, repeat its command, which finishes it."
            )
        raise UserError(f"{path} names no model_type. Name the folder of a model.")
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


def _gguf_files(folder: Path) -> list[str]:
    """Names of the GGUF files in a folder."""
    return sorted(each.name for each in folder.glob("*") if is_gguf(each))


def require_checkpoint(folder: Path) -> None:
    """Refuse a folder whose config, weights or tokenizer are missing or damaged."""
    stored_config(folder)
    tensor_files(folder)
    require_tokenizer(folder)


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
        plain = plain_names(files)
        named = {plain[name]: (path, name) for name, path in files.items()}
        prefix = "model." if _BASE_EMBEDDING in named else ""
        is_wrapped = any(_text_name(name) != name for name in files)
        around = _AROUND_TEXT if is_wrapped else _DRAFTS
        self.left_out = sorted(filter(around.match, named))
        """Names of the tensors around a text model: vision tower, projector, Qwen3.5's drafts."""
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
        if dense.changes is not None:
            for path in dense.changes.glob(f"*/{CHANGED}"):
                tensors._place |= {name: (path, name) for name in _tensor_names(path)}
        if not tied and EMBEDDING in tensors.names and HEAD not in tensors.names:
            raise UserError(
                f"{folder} holds no {HEAD}, and its config.json does not tie the head to the "
                "embedding. If the original's config.json has tie_word_embeddings true, set it "
                "here too; else copy the head from the original checkpoint. Transformers would "
                "make a random one."
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
            raise UserError(f"{missing(part, self.folder)}. Fetch them again.")
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
        stored = self.stored_name(name)
        rows = self._part_of(name).rows
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

    def require_tensors(self, model: nn.Module) -> None:
        """Refuse tensors without a place in a model, and those that it lacks or has otherwise.

        Only headers are read.
        """
        shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        known = {self._part_of(name).stored for name in shapes} | {EMBEDDING, HEAD}
        # Old checkpoints also store the rotary frequencies, which are constant.
        others = sorted(name for name in self.names - known if not name.endswith(".inv_freq"))
        if others:
            raise UserError(unknown_tensors(others, self.folder))
        for name, meant in shapes.items():
            shape, _ = self.describe(name)
            if shape == meant:
                continue
            wrong = (
                f"{name} has shape {shape} in {self.folder}, but its config.json requires {meant}"
            )
            if other := self._other_shape(name, shape):
                raise UserError(
                    f"{wrong}, and {other}. Layers of a pruned model differ in width, and its "
                    "class has one for all. Choose the model before it was pruned."
                )
            raise UserError(f"{wrong}. Fix the config.")

    def _other_shape(self, name: str, shape: tuple[int, ...]) -> str | None:
        """A tensor that has another shape than the same one of another layer."""
        stored = self.stored_name(name)
        if not _IN_LAYER.fullmatch(stored):
            return None
        for number in range(len(self.names)):
            other = _IN_LAYER.sub(rf"\g<1>{number}\g<2>", stored)
            if other not in self.names:
                return None
            other_shape, _ = self.describe(other)
            if other_shape != shape:
                return f"{other} is {other_shape}"
        return None

    def require_model(self, model: nn.Module) -> None:
        """`require_tensors`, and refuse a stored head that is not the embedding it is tied to."""
        self.require_tensors(model)
        # Transformers would run a head that is stored beside the embedding and differs from it.
        if self._alias and {EMBEDDING, HEAD} <= self.names:
            (_, one), (_, other) = self.read_all((EMBEDDING, HEAD))
            if not torch.equal(one.to(other.dtype), other):
                raise UserError(
                    f"{HEAD} and {EMBEDDING} in {self.folder} differ, but its config.json ties "
                    "them. Set tie_word_embeddings to false there."
                )


def unknown_tensors(others: Sequence[str], folder: Path) -> str:
    """Why a folder with tensors that its model has no place for is refused."""
    what, remedy = "its config.json has no place for it", "Compare config.json with the original's."
    if any(map(_LORA.search, others)):
        what = "it is of an adapter that is not merged"
        remedy = "Merge it with peft: model.merge_and_unload().save_pretrained(folder)."
    return f"{others[0]} is stored in {folder}, but {what} ({len(others)} such tensors). {remedy}"


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file; anew for each tensor, because what is read of a mapped file counts as memory."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        if path.is_file() and not os.access(path, os.R_OK):  # safetensors says it is not there
            raise UserError(f"{path}: Permission denied. Get permission to read it.") from error
        raise UserError(f"{path} cannot be read ({one_line(error)}). Get it again.") from error
    except SafetensorError as error:
        with path.open("rb") as raw:
            is_pointer = raw.read(40).startswith(b"version https://git-lfs")
        cause = "a Git LFS pointer; git lfs pull gets the file" if is_pointer else one_line(error)
        raise UserError(f"{path} is no valid safetensors file ({cause}). Get it again.") from error
