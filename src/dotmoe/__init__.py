"""Turn a dense pretrained LLM into an ordinary sparse Mixture-of-Experts checkpoint.

Example::

    import dotmoe

    config = dotmoe.recipe("quickstart", out="run")
    print(dotmoe.convert(config).results)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dotmoe.config import RunConfig
    from dotmoe.data import DataConfig
    from dotmoe.errors import UserError
    from dotmoe.layout import ExpertLayout
    from dotmoe.pipeline import Conversion, convert
    from dotmoe.recipes import recipe

__version__ = "0.1.0"

__all__ = [
    "Conversion",
    "DataConfig",
    "ExpertLayout",
    "RunConfig",
    "UserError",
    "convert",
    "recipe",
]

_HOME = {
    "Conversion": "pipeline",
    "DataConfig": "data",
    "ExpertLayout": "layout",
    "RunConfig": "config",
    "UserError": "errors",
    "convert": "pipeline",
    "recipe": "recipes",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: PyTorch takes seconds to load."""
    if name not in _HOME:
        raise AttributeError(f"module 'dotmoe' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dotmoe.{_HOME[name]}"), name)
