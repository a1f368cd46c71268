"""Moved to `dotmoe.moe.masked`; here until its last callers are moved."""

from dotmoe.moe.masked import masked_activation

__all__ = ["masked_activation"]
