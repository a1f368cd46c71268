"""Moved to `dotmoe.distributed`; here until its last callers are moved."""

from dotmoe.distributed import resolved_device

__all__ = ["resolved_device"]
