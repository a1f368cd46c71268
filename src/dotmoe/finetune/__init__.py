"""STAGE finetune: recovery training of the converted model, with only the chosen experts run."""

from dotmoe.finetune.config import FinetuneConfig, steps_to_take, wants_own_teacher
from dotmoe.finetune.lora import require_peft
from dotmoe.finetune.stage import Start, finetune
from dotmoe.finetune.written import LAYOUT, MODEL

__all__ = [
    "LAYOUT",
    "MODEL",
    "FinetuneConfig",
    "Start",
    "finetune",
    "require_peft",
    "steps_to_take",
    "wants_own_teacher",
]
