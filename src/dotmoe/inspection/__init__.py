"""What a conversion would give and cost, from the config alone: before anything is paid."""

from dotmoe.inspection.dtypes import ExportDtype, stored_dtype
from dotmoe.inspection.finetuning import FinetuneSize
from dotmoe.inspection.inspect_model import Inspection, inspect_model
from dotmoe.inspection.planner import Machines, Plan
from dotmoe.inspection.sizes import RunSize
from dotmoe.inspection.tables import render

__all__ = [
    "ExportDtype",
    "FinetuneSize",
    "Inspection",
    "Machines",
    "Plan",
    "RunSize",
    "inspect_model",
    "render",
    "stored_dtype",
]
