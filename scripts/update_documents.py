"""Put tables made from JSON files into the documents.

A comment names a table, or a generated paragraph, and what it gives follows up to `<!-- end -->`:

    <!-- table: smollm2 -->
    | FFN active | weights | ...
    <!-- end -->

The functions of `document_tables/` make them. So change a function or a JSON file and run this
script; what stands between the comments is not edited by hand.
"""

import argparse
import re
import sys
from pathlib import Path

from document_tables import TABLES
from document_tables.records import ROOT

PART = re.compile(
    r"(?P<head><!-- table: (?P<name>\S+)(?P<words>(?: \S+)*?) -->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)


def part(match: re.Match[str]) -> str:
    """A part of a document, made anew."""
    name = match["name"]
    if name not in TABLES:
        raise SystemExit(f"There is no table {name}. document_tables/ has {', '.join(TABLES)}.")
    return f"{match['head']}{TABLES[name](*match['words'].split())}\n{match['end']}"


def rendered(text: str) -> str:
    """Text of a document with every part made anew."""
    return PART.sub(part, text)


def documents() -> list[Path]:
    """All documents that may have such parts; the overview of experiments reads the others."""
    others = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("experiments/**/*.md")]
    return [ROOT / "README.md", *sorted(others)]


def update(check: bool = False) -> int:
    """Rewrite the documents that are not current; with `check` name the first and return 1."""
    for document in documents():
        before = document.read_text(encoding="utf-8")
        after = rendered(before)
        if check and after != before:
            print(f"{document} is not current. Run: python scripts/update_documents.py")
            return 1
        if after != before:
            document.write_text(after, encoding="utf-8")
    return 0


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Put the tables made from JSON files into README, docs and experiments."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a document is not current"
    )
    return update(parser.parse_args(words).check)


if __name__ == "__main__":
    sys.exit(main())
