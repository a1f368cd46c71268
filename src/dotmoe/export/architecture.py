"""Moved to `dotmoe.export.format`."""

from dotmoe.export.format import granularity_of

__all__ = ["granularity_of"]
