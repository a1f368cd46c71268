"""Moved to `dotmoe.export.routers`."""

from dotmoe.export.routers import at_routers

__all__ = ["at_routers"]
