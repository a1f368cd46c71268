"""A GGUF file of a dense model, read once by Transformers into an ordinary checkpoint folder.

The folder lies in a cache under the SHA-256 of the file, since commands without a run folder read
models too, and several runs of one model share it. All that follows reads it as any checkpoint.
"""

import json
import os
from contextlib import redirect_stderr
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from dotmoe.checkpoint.on_disk import quiet_transformers
from dotmoe.errors import UserError, one_line, require_package
from dotmoe.files import complete_folder, require_free, sha256_of
from dotmoe.progress import Progress

SPLIT_AS_GPT2 = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"}
"""Rules by which llama.cpp cuts text before merging that Transformers follows by default."""
SPLIT_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"}
"""The same with every digit alone, of which Transformers' reader knows nothing."""

_ANOTHER = "Name the model's own checkpoint folder."


def gguf_checkpoint(file: Path, *, config_only: bool = False) -> Path:
    """The folder that holds a GGUF file's model, written at the first call.

    Weights are dequantised, and stored in bfloat16 where that holds all of them exactly, else in
    float32. Reading needs memory for them in float32 about twice.

    Args:
        file: A GGUF of a dense model.
        config_only: The folder need hold no more than config.json.

    Raises:
        UserError: A package is missing, Transformers cannot read the file or would leave out a part
            of it, or it holds no dense model with a tokenizer.
    """
    for package in ("gguf", "accelerate"):
        require_package(package, "gguf", f"{file}, a GGUF,")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dotmoe"
    stat = file.stat()
    name = _sha256(file.resolve(), stat.st_size, stat.st_mtime_ns)
    whole, config = cache / name, cache / f"{name}.config"
    wanted = config if config_only else whole
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{name}.lock"):  # other ranks and processes wait, then find it
        if not config.is_dir():
            with complete_folder(config) as partial:
                _config(file).save_pretrained(partial)
        if not wanted.is_dir():
            Progress().log(f"{file}: read into {whole}, from where later commands take it")
            require_free(cache, 4 * _header(file).entries)
            with complete_folder(whole) as partial, quiet_transformers():
                _tokenizer(file).save_pretrained(partial)
                plain = AutoConfig.from_pretrained(config, local_files_only=True)
                _weights(file, plain).save_pretrained(partial)
    return wanted


@lru_cache
def _sha256(file: Path, size: int, mtime_ns: int) -> str:
    return sha256_of(file)


class _Header(NamedTuple):
    """What is read of a file beside Transformers."""

    experts: int
    scaling: str
    tokenizer: str
    split: str
    tokens: int
    names: list[str]
    types: set[str]
    entries: int


@lru_cache(maxsize=1)  # parsing takes seconds
def _header(file: Path) -> _Header:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except Exception as error:
        raise UserError(f"{file} is no whole GGUF ({one_line(error)}). Get it again.") from error

    def value(key: str) -> Any:
        return reader.fields[key].contents() if key in reader.fields else None

    kind, tokens = value("general.architecture"), reader.fields.get("tokenizer.ggml.tokens")
    return _Header(
        experts=value(f"{kind}.expert_count") or 0,
        scaling=value(f"{kind}.rope.scaling.type") or "none",
        tokenizer=value("tokenizer.ggml.model"),
        split=value("tokenizer.ggml.pre") or "default",
        tokens=len(tokens.data) if tokens else 0,
        names=[tensor.name for tensor in reader.tensors],
        types={tensor.tensor_type.name for tensor in reader.tensors},
        entries=sum(int(tensor.n_elements) for tensor in reader.tensors),
    )


def _config(file: Path) -> Any:
    """Transformers' config; what it would read as something else than it is is refused."""
    header = _header(file)
    if header.experts:
        raise UserError(
            f"{file} is a mixture of {header.experts} experts already. Name the dense model that "
            "it was made of."
        )
    if not header.tokens:
        raise UserError(f"{file} holds no tokenizer. {_ANOTHER}")
    if header.scaling != "none" or any(name.startswith("rope_") for name in header.names):
        raise UserError(
            f"{file} has scaled rotary frequencies, which Transformers does not read from a GGUF. "
            f"{_ANOTHER}"
        )
    config = _read(AutoConfig, file)
    # What the weights will be stored in; norms beside bfloat16 matrices are float32 in a GGUF.
    is_narrow = "BF16" in header.types and header.types <= {"F32", "BF16"}
    config.dtype = torch.bfloat16 if is_narrow else torch.float32
    return config


def _read(reads: Any, file: Path, **options: Any) -> Any:
    try:
        with quiet_transformers(), redirect_stderr(StringIO()):  # a bar that knows no verbosity
            return reads.from_pretrained(file.parent, gguf_file=file.name, **options)
    except Exception as error:
        raise UserError(
            f"Transformers cannot read {file} ({one_line(error)}). {_ANOTHER}"
        ) from error


def _weights(file: Path, config: Any) -> Any:
    model, loaded = _read(
        AutoModelForCausalLM, file, config=config, dtype=torch.float32, output_loading_info=True
    )
    found, own = len(_header(file).names), len(list(model.parameters()))
    lacking = sorted(loaded["missing_keys"]) + sorted(map(str, loaded["mismatched_keys"]))
    if lacking or found != own:
        what = lacking[0] if lacking else f"{found} tensors, but the model has {own}"
        raise UserError(f"Transformers reads {file} in part only ({what}). {_ANOTHER}")
    if all(torch.equal(each.bfloat16().float(), each) for each in model.parameters()):
        model = model.bfloat16()
    # Plain numbers from here on; Transformers refuses to save what it takes for quantised.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    return model


def _tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """Transformers' tokenizer without what its classes add to the file, which cuts as this says."""
    read, header = _read(AutoTokenizer, file), _header(file)
    parts = json.loads(read.backend_tokenizer.to_str())
    # Transformers leaves the rule of GPT-2 where it knows none.
    if header.tokenizer == "gpt2" and parts["pre_tokenizer"]["type"] == "ByteLevel":
        if header.split in SPLIT_DIGITS:
            cuts = [{"type": "Digits", "individual_digits": True}, parts["pre_tokenizer"]]
            parts["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": cuts}
        elif header.split not in SPLIT_AS_GPT2:
            raise UserError(
                f"The tokenizer in {file} cuts text by the rule {header.split!r}, which "
                f"Transformers does not know. {_ANOTHER}"
            )
    added = [token for token in parts["added_tokens"] if token["id"] < header.tokens]
    special = {
        name: token
        for name, token in read.special_tokens_map.items()
        if token in {each["content"] for each in added} or token in parts["model"]["vocab"]
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(parts | {"added_tokens": added})),
        chat_template=read.chat_template,
        clean_up_tokenization_spaces=False,
        **special,
    )
