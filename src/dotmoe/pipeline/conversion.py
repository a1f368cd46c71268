"""The result of a conversion or a finetuning."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dotmoe.common.errors import UserError
from dotmoe.common.tables import Table, shown_as_html, shown_as_text
from dotmoe.measure.report.page import first_screen


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """Result of `convert` or `finetune`: where the files are, and what was measured."""

    folder: Path
    """The run folder."""
    export: Path
    """The checkpoint, loadable by stock Transformers."""
    report: Path
    """HTML page on what the conversion lost and gained; `report.md` is the same without plot."""
    results: dict[str, Any]
    """Contents of `6_evaluate/results.json`; empty on ranks other than rank zero."""

    def __fspath__(self) -> str:
        """The run folder, so that a conversion can be given where a path is asked for."""
        return str(self.folder)

    def __repr__(self) -> str:
        """The table of the report's first screen, and where the files are."""
        return shown_as_text(self._parts())

    def _repr_html_(self) -> str:
        """As `__repr__`, for notebooks."""
        return shown_as_html(self._parts())

    def _parts(self) -> list[Table | str]:
        parts = list[Table | str]()
        if self.results:
            with suppress(UserError, OSError):  # the folder may have been moved
                parts += first_screen(self.folder)
        return [*parts, f"checkpoint  {self.export}\nreport      {self.report}"]
