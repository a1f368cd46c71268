"""Turn a dense pretrained LLM into an ordinary sparse Mixture-of-Experts checkpoint.

Example::

    import dotmoe

    config = dotmoe.recipe("quickstart", out="run")
    print(dotmoe.convert(config).results)
"""

from dataclasses import replace
from typing import Any

from dotmoe.config import RunConfig
from dotmoe.data import DataConfig
from dotmoe.errors import UserError
from dotmoe.layout import ExpertLayout
from dotmoe.pipeline import Conversion, convert
from dotmoe.recipes import recipe_named

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


def recipe(name: str = "default", **changes: Any) -> RunConfig:
    """A named recipe with fields of `RunConfig` replaced, such as `model`, `out` and `data`."""
    return replace(recipe_named(name), **changes)
