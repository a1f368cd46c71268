"""The tables and generated paragraphs of the documents, one function each, by name.

A document names one: `<!-- table: smollm2 -->`. A word behind the name goes to the function:
`<!-- table: measured tab_lte_comparison -->`. `scripts/update_documents.py` writes them. A number
comes from a JSON file, and a missing value is shown as a dash.
"""

from document_tables import campaigns, experiments, front_page, hardware, recorded, results
from document_tables.registry import TABLES

__all__ = ["TABLES", "campaigns", "experiments", "front_page", "hardware", "recorded", "results"]
