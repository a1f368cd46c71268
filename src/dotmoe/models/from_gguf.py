"""GGUF files: reading one, and converting a dense model's to an ordinary checkpoint folder.

The folder is cached by the content of the file and the versions of what made it: commands without a
run folder read models too, and several runs can share it. Later stages read it like any other
checkpoint. Folders of other contents and versions go once nothing has asked for them for a while: a
run may still read one, while a newer version of dotmoe reads the same file.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterable
from contextlib import redirect_stderr, suppress
from hashlib import sha256
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from dotmoe.common.cache import cache_folder, cached_in
from dotmoe.common.errors import UserError, one_line, require_package
from dotmoe.common.files import complete_folder, in_turn, require_free, sha256_of
from dotmoe.models.gguf_header import require_sound_header
from dotmoe.models.gguf_keys import ANOTHER, require_meaning
from dotmoe.models.identity import cached_sha256
from dotmoe.models.stock import forget_versions, quiet_transformers, read_stock
from dotmoe.models.tokenizer import from_parts

logger = logging.getLogger(__name__)

try:
    import gguf
except ImportError as error:
    raise UserError(
        "the gguf package, which reads and writes GGUF files, is not installed. "
        "Run pip install -e '.[gguf]' in the checkout."
    ) from error

SPLIT_AS_GPT2 = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"}
"""Pre-tokenizers of llama.cpp that split text as Transformers does by default."""
SPLIT_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"}
"""Pre-tokenizers of llama.cpp that also split digits, which Transformers' reader leaves out."""


_UNUSED_SECONDS = 7 * 24 * 3600
"""A folder that nothing has asked for in so long a time is removed when another takes its place."""


class GgufFile:
    """A GGUF file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        """Open a file; raises `UserError` if it is missing or no valid GGUF."""
        if not path.is_file():
            raise UserError(f"{path} does not exist. Name a .gguf file.")
        try:
            require_sound_header(path)
            self.reader = gguf.GGUFReader(path)
        except Exception as error:
            raise UserError(
                f"{path} is no valid GGUF file ({one_line(error)}). Get it again."
            ) from error
        self.path = path
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        """Tensors by name; `data` is mapped as stored."""
        self.keys = {key for key in self.reader.fields if not key.startswith("GGUF.")}
        self.arch = str(self.metadata("general.architecture"))

    def metadata(self, key: str) -> Any:
        """The value of a metadata key; None if it is missing."""
        field = self.reader.fields.get(key)
        return None if field is None else field.contents()

    def size(self, key: str, default: int | None = None) -> int:
        """Integer under the architecture's `key`, or `default`; `UserError` if there is neither."""
        value = self.metadata(f"{self.arch}.{key}")
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.path} is no decoder: it lacks {key}. Name a model's GGUF file.")
        return int(value)

    def tensor(self, name: str) -> Tensor:
        """Values of a tensor, dequantised to float32."""
        stored = self.tensors[name]
        values = gguf.quants.dequantize(stored.data, stored.tensor_type)
        return torch.from_numpy(np.array(values, dtype=np.float32))


def gguf_checkpoint(file: Path, *, config_only: bool = False) -> Path:
    """Folder with a GGUF file's dense model, or with its config alone; the first call makes it.

    Weights are dequantised, and stored in bfloat16 if that represents all of them exactly, else in
    float32. Reading takes about twice the memory of the float32 weights. Raises `UserError` for a
    file that Transformers cannot read completely.
    """
    require_package("accelerate", "gguf", f"{file}, a GGUF,")
    cache = cache_folder()
    of_file = sha256(str(file.resolve()).encode()).hexdigest()[:16]
    name = f"{of_file}-{_key_of(file)[:16]}"
    whole, config = cache / name, cache / f"{name}.config"
    wanted = config if config_only else whole
    if wanted.is_dir():
        with suppress(OSError):  # the cache may be read-only
            os.utime(wanted)
        return wanted
    cached_in()
    with in_turn(cache / f"{of_file}.lock"):  # other ranks and processes wait, then find it
        if wanted.is_dir():
            return wanted
        opened = GgufFile(file)
        _remove_unused(cache.glob(f"{of_file}-*"), (whole, config))
        if not config.is_dir():
            with complete_folder(config) as partial:
                _config(opened).save_pretrained(partial)
                forget_versions(partial)
                template = opened.metadata("tokenizer.chat_template")
                if isinstance(template, str):
                    (partial / "chat_template.jinja").write_text(template, encoding="utf-8")
        if not config_only:
            entries = sum(int(each.n_elements) for each in opened.tensors.values())
            require_free(cache, 4 * entries)
            logger.warning(
                "%s: converted to %s, which later commands use; it may be deleted", file, whole
            )
            with complete_folder(whole) as partial, quiet_transformers():
                _tokenizer(opened).save_pretrained(partial)
                plain = read_stock(AutoConfig, config)
                _weights(opened, plain).save_pretrained(partial)
                forget_versions(partial)
    return wanted


def _remove_unused(folders: Iterable[Path], kept: Collection[Path]) -> None:
    """Remove folders that nothing has asked for in a long time."""
    before = time.time() - _UNUSED_SECONDS
    for folder in folders:
        if folder not in kept and folder.stat().st_mtime < before:
            shutil.rmtree(folder, ignore_errors=True)


def _key_of(file: Path) -> str:
    """SHA-256 of a file's content and of all that reads it, as text."""
    readers = [f"{name} {version(name)}" for name in ("gguf", "tokenizers", "transformers")]
    modules = ("from_gguf", "gguf_header", "gguf_keys", "stock", "tokenizer")
    own = [sha256_of(Path(__file__).with_name(f"{module}.py")) for module in modules]
    return sha256("\n".join([cached_sha256(file), *readers, *own]).encode()).hexdigest()


def _config(file: GgufFile) -> Any:
    """The config as Transformers reads it; refuses a file that Transformers would misread."""
    parts = file.metadata("split.count") or 1
    if parts > 1:
        raise UserError(
            f"{file.path} is one of {parts} parts of a model. Join them, with the first of them: "
            "llama-gguf-split --merge FIRST.gguf WHOLE.gguf, and name that file."
        )
    if experts := file.size("expert_count", 0):
        raise UserError(
            f"{file.path} is a mixture of {experts} experts already. Name the dense model that it "
            "was made from."
        )
    if "tokenizer.ggml.tokens" not in file.keys:
        raise UserError(f"{file.path} holds no tokenizer. {ANOTHER}")
    is_scaled = file.metadata(f"{file.arch}.rope.scaling.type") not in (None, "none")
    if is_scaled or any(name.startswith("rope_") for name in file.tensors):
        raise UserError(
            f"{file.path} has scaled rotary frequencies, which Transformers does not read from a "
            f"GGUF. {ANOTHER}"
        )
    config = _read(AutoConfig, file)
    prefix = f"{file.arch}."
    own = {key.removeprefix(prefix): key for key in file.keys if key.startswith(prefix)}
    stored = {name: file.metadata(key) for name, key in own.items()}
    require_meaning(file.path, file.arch, stored, config)
    types = {tensor.tensor_type.name for tensor in file.tensors.values()}
    # Dtype of the weights in the folder; a GGUF stores norms in float32 beside bfloat16 matrices.
    is_narrow = "BF16" in types and types <= {"F32", "BF16"}
    config.dtype = torch.bfloat16 if is_narrow else torch.float32
    return config


def _read(reader: Any, file: GgufFile, **options: Any) -> Any:
    """What a class of Transformers reads from a file alone: files beside it would replace parts."""
    with TemporaryDirectory() as alone, redirect_stderr(StringIO()):  # a bar ignores verbosity
        (Path(alone) / "model.gguf").symlink_to(file.path.resolve())
        try:
            return read_stock(reader, Path(alone), gguf_file="model.gguf", **options)
        except Exception as error:
            why = one_line(error).replace(alone, str(file.path.parent))
            raise UserError(f"Transformers cannot read {file.path} ({why}). {ANOTHER}") from error


def _weights(file: GgufFile, config: Any) -> Any:
    options: dict[str, Any] = {"config": config, "dtype": torch.float32}
    if can_keep_blocks := getattr(transformers, "GgufConfig", None):  # in later versions
        options["quantization_config"] = can_keep_blocks(dequantize=True)
    model, loaded = _read(AutoModelForCausalLM, file, output_loading_info=True, **options)
    stored, own = len(file.tensors), len(list(model.parameters()))
    lacking = sorted(loaded["missing_keys"]) + sorted(map(str, loaded["mismatched_keys"]))
    if lacking or stored != own:
        what = lacking[0] if lacking else f"{stored} tensors, but the model has {own}"
        raise UserError(f"Transformers reads only part of {file.path} ({what}). {ANOTHER}")
    if all(torch.equal(each.bfloat16().float(), each) for each in model.parameters()):
        model = model.bfloat16()
    # The weights are plain now; Transformers refuses to save a model marked as quantised.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    return model


def _tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """Transformers' tokenizer without the tokens it adds; splits text as the file specifies."""
    read = _read(AutoTokenizer, file)
    parts = json.loads(read.backend_tokenizer.to_str())
    cut = parts["pre_tokenizer"]
    rule = file.metadata("tokenizer.ggml.pre") or "default"
    # Transformers keeps the rule of GPT-2 for those that it does not know.
    if file.metadata("tokenizer.ggml.model") == "gpt2" and cut["type"] == "ByteLevel":
        if rule in SPLIT_DIGITS:
            cuts = [{"type": "Digits", "individual_digits": True}, cut]
            parts["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": cuts}
        elif rule not in SPLIT_AS_GPT2:
            raise UserError(
                f"The tokenizer in {file.path} splits text by rule {rule!r}, which Transformers "
                f"does not know. {ANOTHER}"
            )
    num_tokens = len(file.metadata("tokenizer.ggml.tokens"))
    return from_parts(parts, read, num_tokens)
