"""STAGE report: result files in, tables and words out. Nothing is computed again."""

from dotmoe.report.active_experts_curve import curve_table, draw_curve, require_drawable
from dotmoe.report.html_page import NO_PLOTS, default_page, html_report
from dotmoe.report.page import report
from dotmoe.report.plots import is_installed
from dotmoe.report.recovery import recovery_report
from dotmoe.report.tables import quickstart_summary, recovery_summary, summary

__all__ = [
    "NO_PLOTS",
    "curve_table",
    "default_page",
    "draw_curve",
    "html_report",
    "is_installed",
    "quickstart_summary",
    "recovery_report",
    "recovery_summary",
    "report",
    "require_drawable",
    "summary",
]
