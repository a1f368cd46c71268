"""Moved to `dotmoe.training.loop`; here until its last callers are moved."""

from dotmoe.training.loop import TrainingConfig

__all__ = ["TrainingConfig"]
