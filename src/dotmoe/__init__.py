"""Turn a dense pretrained LLM into an ordinary sparse Mixture-of-Experts checkpoint.

Example::

    import dotmoe

    config = dotmoe.recipe("quickstart", out="run")
    print(dotmoe.convert(config).results)
    config = dotmoe.finetune_recipe("small", run="run", out="finetuned")
    print(dotmoe.finetune(config).results)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dotmoe.common.errors import UserError
    from dotmoe.method.config import FinetuneConfig
    from dotmoe.method.layout import ExpertLayout
    from dotmoe.models.config import LoadConfig
    from dotmoe.pipeline.convert import convert
    from dotmoe.pipeline.finetune import finetune
    from dotmoe.pipeline.stages import Conversion
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
    "RunConfig",
    "TrainingConfig",
    "UserError",
    "convert",
    "finetune",
    "finetune_recipe",
    "recipe",
]

_HOMES = {
    "run.config": ("FinetuneRunConfig", "RunConfig", "finetune_recipe", "recipe"),
    "text.config": ("DataConfig",),
    "common.errors": ("UserError",),
    "method.config": ("FinetuneConfig",),
    "method.layout": ("ExpertLayout",),
    "models.config": ("LoadConfig",),
    "pipeline.convert": ("convert",),
    "pipeline.finetune": ("finetune",),
    "pipeline.stages": ("Conversion",),
    "training.config": ("TrainingConfig",),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, because PyTorch takes seconds to load."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"dotmoe.{home}"), name)
    raise AttributeError(f"module 'dotmoe' has no attribute {name!r}")
