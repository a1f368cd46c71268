"""results/: what is measured names the clean commit that it was measured at."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "results").rglob("*.json"))
OFFENDERS = ROOT / "tests" / "repo" / "results_without_commit.txt"
KNOWN = {line for line in OFFENDERS.read_text().splitlines() if not line.startswith("#")}
"""May only shrink: a file that is made again goes from it."""
MOST = 13


def commits(value):
    """Of every provenance in a result."""
    if isinstance(value, dict):
        if "provenance" in value:
            yield (value["provenance"] or {}).get("commit")
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from commits(each)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_result_names_a_clean_commit(file):
    found = list(commits(json.loads(file.read_text(encoding="utf-8"))))
    is_clean = bool(found) and all(commit and "+" not in commit for commit in found)
    name = str(file.relative_to(ROOT / "results"))
    assert is_clean == (name not in KNOWN), f"{name}: {found}"


def test_the_list_of_offenders_only_shrinks():
    names = {str(file.relative_to(ROOT / "results")) for file in FILES}
    assert names >= KNOWN
    assert len(KNOWN) <= MOST
