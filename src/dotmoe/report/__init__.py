"""STAGE report: result files in, tables and words out. Nothing is computed again."""

from dotmoe.report.page import report
from dotmoe.report.tables import quickstart_summary, summary

__all__ = ["quickstart_summary", "report", "summary"]
