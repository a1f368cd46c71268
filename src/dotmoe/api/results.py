"""Results of the functions of the package: values as in JSON, shown as tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from dotmoe.common.tables import Table, shown_as_html, shown_as_text


class Result(dict[str, Any]):
    """The values of a result, a dict as in its JSON file.

    It prints as its tables, and is shown as tables in a notebook.
    """

    def __init__(self, values: Mapping[str, Any], parts: Sequence[Table | str]) -> None:
        super().__init__(values)
        self._parts = parts

    def __repr__(self) -> str:
        """The tables as text."""
        return shown_as_text(self._parts)

    def _repr_html_(self) -> str:
        """The tables as HTML, for notebooks."""
        return shown_as_html(self._parts)
