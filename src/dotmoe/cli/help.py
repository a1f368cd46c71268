"""Help texts, as wide as the terminal: the overview, and the options of a command."""

import shutil
from collections.abc import Iterator, Sequence
from itertools import groupby
from textwrap import TextWrapper

from dotmoe.cli.options import Option
from dotmoe.cli.table import COMMANDS
from dotmoe.common.options import Need

_COLUMNS = 100
"""Width where there is no terminal."""
_INDENT = 26
"""Column where texts of options start, in a terminal of at least three times as many."""

Groups = dict[str, str]
"""What each group of options is, by its name; the empty name is that of the command itself."""


def overview() -> str:
    """What `dotmoe --help` prints."""
    width = 2 + max(map(len, COMMANDS))
    lines = ["usage: dotmoe COMMAND ...   (dotmoe COMMAND --help shows its options)", ""]
    for name, command in COMMANDS.items():
        lines += _item(name, command.help, _columns(), width + 2)
    return "\n".join(lines)


def of_options(
    program: str,
    paragraphs: Sequence[str],
    options: Sequence[Option],
    groups: Groups,
    needs: Sequence[Need] = (),
    common: Sequence[str] = (),
) -> str:
    """Usage, paragraphs and options in their groups; of the options only the common ones, if any.

    Arguments are always shown.
    """
    columns = _columns()
    places = [option.typed for option in options if option.is_argument and option.is_required]
    parts = [" ".join(["usage:", program, *places, "[OPTIONS]"])]
    parts += ["\n".join(_wrapped(paragraph, columns)) for paragraph in paragraphs]
    shown = [each for each in options if _is_shown(each, common)]
    about = {} if common else groups
    for title, members in groupby(shown, lambda option: _title_of(option, about)):
        lines = _wrapped(title, columns)
        for option in members:
            lines += _item(option.shown, option.text(needs), columns)
        parts.append("\n".join(lines))
    parts.append("\n".join(_about_help(options, common, columns)))
    return "\n\n".join(parts)


def _is_shown(option: Option, common: Sequence[str]) -> bool:
    if option.is_argument:
        return option.is_required
    return not common or option.typed.removeprefix("--") in common


def _title_of(option: Option, groups: Groups) -> str:
    if option.is_argument:
        return "arguments"
    if not option.group:
        return "options"
    return f"{option.group} options: {groups.get(option.group, '')}".rstrip(": ")


def _about_help(options: Sequence[Option], common: Sequence[str], columns: int) -> Iterator[str]:
    yield "help"
    yield from _item("-h, --help", "show this text", columns)
    if common:
        number = len([option for option in options if not option.is_argument])
        yield from _item("--help-all", f"show all {number} options", columns)


def _item(name: str, text: str, columns: int, indent: int = _INDENT) -> list[str]:
    """A name and, in a column beside it, its text; below the name if that is too long."""
    indent = min(indent, columns // 3)
    lines = [" " * indent + line for line in _wrapped(text, columns - indent)]
    head = f"  {name}"
    if len(head) >= indent or not lines:
        return [*_wrapped(head, columns, "    "), *lines]
    return [head + lines[0][len(head) :], *lines[1:]]


def _wrapped(text: str, columns: int, later: str = "") -> list[str]:
    """Lines of a text, broken at spaces alone."""
    wrapper = TextWrapper(
        columns, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text)


def _columns() -> int:
    return max(40, shutil.get_terminal_size((_COLUMNS, 24)).columns)
