"""The look of an inspection's tables."""

from rich import box
from rich.table import Table


def table_of(*columns: str) -> Table:
    """An empty table, its first column of words and the others of figures."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(columns))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=index > 0)
    return table
