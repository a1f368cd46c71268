"""Recovery training as one command: the stages of `dotmoe finetune`, composed."""

from dotmoe.recovery.run import Recovery, recover

__all__ = ["Recovery", "recover"]
