"""Report: result files in, tables, plots and words out. Nothing is computed again."""

from dotmoe.report.page import (
    default_page,
    evaluation,
    html_report,
    quickstart_summary,
    report,
    summary,
)
from dotmoe.report.plots import NO_PLOTS, draw_curve, is_installed, require_drawable
from dotmoe.report.tables import curve_table, perplexity_table

__all__ = [
    "NO_PLOTS",
    "curve_table",
    "default_page",
    "draw_curve",
    "evaluation",
    "html_report",
    "is_installed",
    "perplexity_table",
    "quickstart_summary",
    "report",
    "require_drawable",
    "summary",
]
