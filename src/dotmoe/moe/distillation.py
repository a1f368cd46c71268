"""Moved to `dotmoe.moe.losses`; here until its last callers are moved."""

from dotmoe.moe.losses import chunk_rows, distillation_loss

__all__ = ["chunk_rows", "distillation_loss"]
