"""Moved to `dotmoe.moe.masked` and `units`; here until its last callers are moved."""

from dotmoe.moe.masked import masked, masked_by
from dotmoe.moe.units import recomputing

__all__ = ["masked", "masked_by", "recomputing"]
