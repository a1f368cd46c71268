"""Moved to `dotmoe.checkpoint.folder`."""

from dotmoe.checkpoint.folder import (
    EMBEDDED,
    TOKENIZER_FILES,
    checkpoint_folder,
    fingerprint,
    is_local,
    require_checkpoint,
)
from dotmoe.checkpoint.folder import tensor_files as dense_tensor_files
from dotmoe.errors import one_line
from dotmoe.files import read_json as json_object

__all__ = [
    "EMBEDDED",
    "TOKENIZER_FILES",
    "checkpoint_folder",
    "dense_tensor_files",
    "fingerprint",
    "is_local",
    "json_object",
    "one_line",
    "require_checkpoint",
]
