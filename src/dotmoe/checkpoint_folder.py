"""Moved to `dotmoe.checkpoint.folder`."""

from dotmoe.checkpoint.folder import (  # noqa: F401
    EMBEDDED,
    TOKENIZER_FILES,
    checkpoint_folder,
    fingerprint,
    is_local,
    require_checkpoint,
)
from dotmoe.checkpoint.folder import tensor_files as dense_tensor_files  # noqa: F401
from dotmoe.errors import one_line  # noqa: F401
from dotmoe.files import read_json as json_object  # noqa: F401
