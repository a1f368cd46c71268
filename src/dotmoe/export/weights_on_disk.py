"""Moved to `dotmoe.checkpoint.on_disk`."""

from dotmoe.checkpoint.on_disk import on_disk

__all__ = ["on_disk"]
