"""The parts of documents, by the names that documents use."""

from collections.abc import Callable

TABLES: dict[str, Callable[..., str]] = {}
"""Functions that give a part of a document, by the name that documents use."""


def part(make: Callable[..., str]) -> Callable[..., str]:
    """Register a function as the part of its name, hyphens for underscores."""
    TABLES[make.__name__.replace("_", "-")] = make
    return make
