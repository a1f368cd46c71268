"""Moved to `dotmoe.distributed`; here until its last callers are moved."""

from dotmoe.distributed import local_part

__all__ = ["local_part"]
