"""STAGE report: result files in, tables and words out. Nothing is computed again."""

from dotmoe.report.active_experts_curve import curve_table, draw_curve, require_drawable
from dotmoe.report.page import report
from dotmoe.report.tables import quickstart_summary, summary

__all__ = [
    "curve_table",
    "draw_curve",
    "quickstart_summary",
    "report",
    "require_drawable",
    "summary",
]
