"""STAGE export to GGUF: a dense checkpoint and an `ExpertLayout` become a file for llama.cpp."""

from dotmoe.errors import UserError

try:
    import gguf as _gguf  # noqa: F401 - here for its absence to be told in one line
except ImportError as error:
    raise UserError(
        "the gguf package is not installed, and GGUF files are written with it. "
        "Run pip install 'dotmoe[gguf]'."
    ) from error

from dotmoe.gguf_export.active_experts import set_active_experts
from dotmoe.gguf_export.config import GgufConfig
from dotmoe.gguf_export.dense import write_dense_gguf
from dotmoe.gguf_export.llama_cpp_runtime import LlamaCppModel
from dotmoe.gguf_export.mixture import GGUF_OUTPUTS, export_gguf, gguf_output_for, gguf_refusal
from dotmoe.gguf_export.record import GgufRecord, GgufVerification
from dotmoe.llama_cpp import is_installed

__all__ = [
    "GGUF_OUTPUTS",
    "GgufConfig",
    "GgufRecord",
    "GgufVerification",
    "LlamaCppModel",
    "export_gguf",
    "gguf_output_for",
    "gguf_refusal",
    "is_installed",
    "set_active_experts",
    "write_dense_gguf",
]
