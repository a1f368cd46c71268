"""The config of a checkpoint, read by Transformers and refused where it cannot be used."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig

from dotmoe.common.errors import UserError, one_line
from dotmoe.common.files import Values, read_json
from dotmoe.models.checkpoint import HEAD, plain_names, stored_config, tensor_files
from dotmoe.models.config_values import (
    require_context,
    require_known_rope,
    require_one_rope,
    require_read,
    require_rope_numbers,
)
from dotmoe.models.family import FAMILIES, family_of, no_family
from dotmoe.models.hf_config import state_ffn_width
from dotmoe.models.meta_model import meta_model
from dotmoe.models.source import checkpoint_folder
from dotmoe.models.stock import read_stock


def dense_config(source: str) -> tuple[Any, Path]:
    """The config of a checkpoint, and the local folder that contains it."""
    folder = checkpoint_folder(source, config_only=True)
    path = folder / "config.json"
    plain = stored_config(folder)
    model_type = str(plain["model_type"])
    types = {model_type}
    text = plain.get("text_config")
    if isinstance(text, dict):
        types.add(str(text.get("model_type")))
    if types.isdisjoint(FAMILIES):  # Transformers may not know it
        raise no_family(SimpleNamespace(**plain | {"model_type": model_type}))
    if plain.get("quantization_config"):
        raise UserError(
            f"{path} has a quantization_config, but the weights must be plain numbers to be split "
            "exactly. Choose the unquantised checkpoint."
        )
    config = config_of(folder)
    family = family_of(config)
    with _valid_config(path):
        model = meta_model(config)
        rotated = family.traits(model).rotated
        own = plain if config.model_type == model_type else text or plain
        require_read(own, config, rotated, path)
    if bias := family.bias_in_ffn(model):
        raise UserError(
            f"{path} gives FFNs a bias ({bias}), but no stock MoE has one. Choose a model "
            "without it."
        )
    return config, folder


@contextmanager
def _valid_config(path: Path) -> Iterator[None]:
    """Within this context, what Transformers says of a config's values becomes a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of any type: it depends on the invalid value
        why = one_line(error)
        if isinstance(error, KeyError):  # a bare key, or a sentence that its text would quote
            why = error.args[0] if " " in str(error.args[0]) else f"{error} is missing"
        raise UserError(
            f"{path} is no valid {read_json(path)['model_type']} config ({why}). "
            "Compare it with the original checkpoint's."
        ) from error


def config_of(folder: Path) -> Any:
    """The config in a folder, with `pad_token_id` None if the embedding has no such row.

    For a model of more than text, it is that of its text model, tied if no head is stored.
    Transformers chooses the attention kernel, not the checkpoint, which may name one that is not
    installed. It builds no model with a pad token beyond the embedding, and with -1, as LLaMA has
    it, passes no gradient to the last row. Raises `UserError` for values that it cannot use.
    """
    path = folder / "config.json"
    plain = stored_config(folder)
    if plain.get("auto_map") and plain["model_type"] not in CONFIG_MAPPING:
        raise UserError(
            f"{path} names code of its own (auto_map), which dotmoe does not run, and Transformers "
            f"knows no model_type {plain['model_type']!r}. Choose a model of a type that it knows."
        )
    with _valid_config(path):
        require_rope_numbers(plain, path)
        require_rope_numbers(plain.get("text_config") or {}, path)
        config = _read_config(folder, plain)
        require_known_rope(config, path)
        require_one_rope(plain, path)
        require_context(config, path)
    return config


def _read_config(folder: Path, plain: Values) -> Any:
    whole: Any = read_stock(AutoConfig, folder)
    config = whole.get_text_config(decoder=True)
    if config is not whole:
        is_tied = plain.get("tie_word_embeddings")
        if is_tied is not None:
            config.tie_word_embeddings = is_tied
        config.dtype = config.dtype or whole.dtype
        with suppress(UserError):  # there may be no weights beside the config
            if HEAD in plain_names(tensor_files(folder)).values():
                config.tie_word_embeddings = False
    state_ffn_width(config)
    config._attn_implementation = None
    pad = getattr(config, "pad_token_id", None)
    rows = getattr(config, "vocab_size", None)
    if isinstance(pad, int) and isinstance(rows, int) and not 0 <= pad < rows:
        config.pad_token_id = None
    return config
