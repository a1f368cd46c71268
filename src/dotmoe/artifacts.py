"""Moved to `dotmoe.models.dense`."""

from dotmoe.models.dense import DenseModel

__all__ = ["DenseModel"]
