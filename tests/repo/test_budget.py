"""How large the project may be, as a whole: limits on pieces alone are met by dividing them.

These limits are only to be lowered.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ("src",)
ALL = ("src", "tests", "benchmarks", "experiments", "scripts")


@pytest.mark.parametrize(("folders", "limit"), [(SOURCE, 20_000), (ALL, 39_000)])
def test_the_whole_stays_within_its_budget(folders, limit):
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= limit
