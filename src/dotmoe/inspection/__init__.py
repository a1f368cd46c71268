"""What a conversion would give and cost, from the config alone: before anything is paid."""

from dotmoe.inspection.costs import RunSize
from dotmoe.inspection.inspect_model import Inspection, inspect_model, render

__all__ = ["Inspection", "RunSize", "inspect_model", "render"]
