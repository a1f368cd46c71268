"""Tables of the campaigns."""

import json
from typing import Any

from document_tables import campaign_table
from document_tables.cells import tabled
from document_tables.records import ROOT
from document_tables.registry import part

CAMPAIGNS = ("qwen25_coder_1.5b", "qwen25_coder_0.5b", "gemma3_270m", "smollm2")
"""Models of campaigns, the largest first."""


@part
def kept() -> str:
    """What conversions of models that have a campaign keep, beside rivals."""
    return campaign_table.front_page(campaign_records(), tabled)


@part
def kept_of_results() -> str:
    """The same table, its links from the page of results."""
    return kept().replace("](results/", "](../../results/")


def campaign_records() -> dict[str, Any]:
    """Results of the campaigns that were made by their files, of the largest model first."""
    files = [f"results/campaign_{name}.json" for name in CAMPAIGNS]
    return {
        file: json.loads((ROOT / file).read_text(encoding="utf-8"))
        for file in files
        if (ROOT / file).is_file()
    }


@part
def campaign(name: str) -> str:
    """Rows and measures of the campaign on a model, or the command that makes it."""
    file = f"results/campaign_{name}.json"
    if not (ROOT / file).is_file():
        return f"Not measured yet: `make campaign MODEL={name}`."
    record = json.loads((ROOT / file).read_text(encoding="utf-8"))
    by, commits_of_it = record["provenance"], ", ".join(f"`{each}`" for each in record["made_at"])
    source = f"Commit {commits_of_it}; {by['hardware']}, torch {by['versions']['torch']}; {file}."
    return f"{campaign_table.tables(record, tabled)}\n\n{source}"
