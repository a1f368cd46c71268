"""Turn a dense pretrained LLM into an ordinary sparse Mixture-of-Experts checkpoint.

Example::

    import dotmoe

    config = dotmoe.recipe("quickstart", out="run")
    print(dotmoe.convert(config).results)
    config = dotmoe.recovery_recipe("small", run="run", out="recovered")
    print(dotmoe.recover(config).results)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dotmoe.config import RunConfig
    from dotmoe.data import DataConfig
    from dotmoe.errors import UserError
    from dotmoe.finetune import FinetuneConfig
    from dotmoe.layout import ExpertLayout
    from dotmoe.load import LoadConfig
    from dotmoe.pipeline import Conversion, convert
    from dotmoe.recipes import recipe, recovery_recipe
    from dotmoe.recovery import Recovery, recover
    from dotmoe.recovery_config import RecoveryConfig
    from dotmoe.training.config import TrainingConfig

__version__ = "0.1.0"

__all__ = [
    "Conversion",
    "DataConfig",
    "ExpertLayout",
    "FinetuneConfig",
    "LoadConfig",
    "Recovery",
    "RecoveryConfig",
    "RunConfig",
    "TrainingConfig",
    "UserError",
    "convert",
    "recipe",
    "recover",
    "recovery_recipe",
]

_HOME = {
    "Conversion": "pipeline",
    "DataConfig": "data",
    "ExpertLayout": "layout",
    "FinetuneConfig": "finetune",
    "LoadConfig": "load",
    "Recovery": "recovery",
    "RecoveryConfig": "recovery_config",
    "RunConfig": "config",
    "TrainingConfig": "training.config",
    "UserError": "errors",
    "convert": "pipeline",
    "recipe": "recipes",
    "recover": "recovery",
    "recovery_recipe": "recipes",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: PyTorch takes seconds to load."""
    if name not in _HOME:
        raise AttributeError(f"module 'dotmoe' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dotmoe.{_HOME[name]}"), name)
