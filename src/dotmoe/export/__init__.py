"""Formats of exports, their check, record and card."""
