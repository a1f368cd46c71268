"""HTML out of Python values: every text is escaped unless it is `Markup` already."""

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any


class Markup(str):
    """HTML that goes into the page as it is. Only the functions here make it of foreign text."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str) -> Markup:
    """An element with its children; `class_` is the attribute `class`.

    Example:
        >>> element("p", "a < b", class_="note")
        '<p class="note">a &lt; b</p>'
    """
    said = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for name, value in attributes.items()
    )
    return Markup(f"<{tag}{said}>{joined(children)}</{tag}>")


def joined(children: Iterable[str]) -> Markup:
    """Pieces one after the other."""
    return Markup("".join(c if isinstance(c, Markup) else html.escape(c) for c in children))


def paragraph(*children: str, **attributes: str) -> Markup:
    """Running text; a number and its % stay on one line."""
    kept = [c if isinstance(c, Markup) else c.replace(" %", "\u00a0%") for c in children]
    return element("p", *kept, **attributes)


def strong(text: str) -> Markup:
    """What the eye should find first."""
    return element("strong", text)


def code(text: str) -> Markup:
    """Something to be typed, or a name in a file."""
    return element("code", text)


def command(text: str) -> Markup:
    """A command line in a box of its own."""
    return element("pre", element("code", text), class_="command")


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "", words: int = 1
) -> Markup:
    """A table that scrolls within its own box where the screen is narrow.

    Args:
        columns: Titles.
        rows: Cells. The first of each row is its title.
        caption: What stands above it.
        words: So many columns from the left hold words; those after them hold figures.
    """
    sides = ["word" if index < max(1, words) else "figure" for index in range(len(columns))]
    head = [element("th", t, scope="col", class_=s) for t, s in zip(columns, sides, strict=True)]
    body = []
    for row in rows:
        first, *others = row
        cells = [element("th", first, scope="row", class_="word")]
        cells += [element("td", c, class_=side) for c, side in zip(others, sides[1:], strict=True)]
        body.append(element("tr", *cells))
    above = paragraph(caption, class_="caption") if caption else Markup()
    box = element(
        "div",
        element("table", element("thead", element("tr", *head)), element("tbody", *body)),
        class_="scrolls",
        tabindex="0",
        role="region",
        aria_label=caption or columns[0] or "table",
    )
    return joined([above, box])


def figure(value: Any, form: str = ".4g") -> str:
    """A number as the page shows it; a dash where there is none.

    Example:
        >>> figure(0.123456), figure(None), figure(1200, ",")
        ('0.1235', '-', '1,200')
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return format(value, form if isinstance(value, float) or form != ".4g" else ",")
