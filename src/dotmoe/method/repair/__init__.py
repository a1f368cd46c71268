"""Repair by layers: train the FFNs under the masks, or refit W_down or W_O in closed form.

`streams` poses the problem of each layer, `ffn_training` and `refit` solve it, `by_layer` calls
them in turn and writes what they find.
"""

from dotmoe.method.repair.by_layer import REPAIR_METRICS, repair
from dotmoe.method.repair.ffn_training import BATCH
from dotmoe.method.repair.refit import SOLUTIONS
from dotmoe.method.repair.streams import HELD_OUT_ROWS, repair_tokens

__all__ = ["BATCH", "HELD_OUT_ROWS", "REPAIR_METRICS", "SOLUTIONS", "repair", "repair_tokens"]
