"""Turn a dense pretrained LLM into an ordinary sparse Mixture-of-Experts checkpoint.

Example::

    import dotmoe

    run = dotmoe.convert("embedded", "run", data="python-stdlib", active=0.75, expert_size=16)
    print(run)
    print(dotmoe.evaluate(run, text="python-stdlib-heldout", max_tokens=4096))
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dotmoe.api.functions import (
        bench,
        compare,
        convert,
        evaluate,
        export,
        finetune,
        inspect,
        prune,
    )
    from dotmoe.api.results import Result
    from dotmoe.common.errors import UserError
    from dotmoe.method.config import FinetuneConfig
    from dotmoe.method.layout import ExpertLayout
    from dotmoe.models.config import LoadConfig
    from dotmoe.pipeline.conversion import Conversion
    from dotmoe.run.config import FinetuneRunConfig, RunConfig, finetune_recipe, recipe
    from dotmoe.text.config import DataConfig
    from dotmoe.training.config import TrainingConfig

__version__ = "0.1.0"

__all__ = [
    "Conversion",
    "DataConfig",
    "ExpertLayout",
    "FinetuneConfig",
    "FinetuneRunConfig",
    "LoadConfig",
    "Result",
    "RunConfig",
    "TrainingConfig",
    "UserError",
    "bench",
    "compare",
    "convert",
    "evaluate",
    "export",
    "finetune",
    "finetune_recipe",
    "inspect",
    "prune",
    "recipe",
]

_HOMES = {
    "Conversion": "pipeline.conversion",
    "DataConfig": "text.config",
    "ExpertLayout": "method.layout",
    "FinetuneConfig": "method.config",
    "FinetuneRunConfig": "run.config",
    "LoadConfig": "models.config",
    "Result": "api.results",
    "RunConfig": "run.config",
    "TrainingConfig": "training.config",
    "UserError": "common.errors",
    "finetune_recipe": "run.config",
    "recipe": "run.config",
}
"""Modules of public names; all others are functions of `api.functions`."""

# A function and a folder of modules are both named `export`. Python sets the attribute to the
# folder when it first imports it, so this is done here, once, and undone.
importlib.import_module("dotmoe.export")
del globals()["export"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, because PyTorch takes seconds to load."""
    if name in __all__:
        home = _HOMES.get(name, "api.functions")
        return getattr(importlib.import_module(f"dotmoe.{home}"), name)
    raise AttributeError(f"module 'dotmoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, for tab completion."""
    return sorted([*__all__, "__version__"])
