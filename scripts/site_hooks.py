"""Hooks of mkdocs, see mkdocs.yml.

The site's first page is README.md. A file that a page links to outside of docs/ gets into the site,
with its own links. The page on commands is made from the configs and their docstrings.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest.mock import patch

import docstring_parser
import tyro
from mkdocs.structure.files import File

from dotmoe.cli import COMMANDS, run
from dotmoe.common.options import Range, marked_fields

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:)[^)#\s]+|(?<=src=\")[^\"]+\.svg")
COMMANDS_GO_HERE = "<!-- commands -->"
CODE_OF_CELL = re.compile(r"<code>[^<]{24,}</code>(?=[^\n]*</td>)")
PICTURE = re.compile(r"<picture>.*?</picture>", re.DOTALL)


def path_of(uri: str) -> str:
    """Path in the repository of a page's address in the site."""
    if uri == "index.md":
        return "README.md"
    return f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri


def address_of(path: str) -> str:
    """Address in the site of a path in the repository."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def target_of(page: str, link: str) -> str:
    """Path in the repository that a link of a page leads to."""
    return os.path.normpath(os.path.join(os.path.dirname(path_of(page)), link))


def on_files(files: Any, config: Any) -> Any:
    """Add the first page, and what pages link to outside of docs/."""
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    waiting = [file.src_uri for file in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        for link in LINK.findall((ROOT / path_of(page)).read_text(encoding="utf-8")):
            path = target_of(page, link)
            if (ROOT / path).is_file() and address_of(path) not in files.src_uris:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
                waiting += [path] * path.endswith(".md")
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links lead to the site's addresses, and put the commands in."""
    uri = page.file.src_uri
    if COMMANDS_GO_HERE in markdown:
        shown = set[str]()
        sections = "\n\n".join(command_text(name, shown) for name in COMMANDS)
        markdown = markdown.replace(COMMANDS_GO_HERE, sections)

    def address(link: re.Match[str]) -> str:
        return os.path.relpath(address_of(target_of(uri, link[0])), os.path.dirname(uri) or ".")

    def both(picture: re.Match[str]) -> str:
        light, alt = re.findall(r'(?:src|alt)="([^"]+)"', picture[0])
        dark = light.replace(".svg", "-dark.svg")
        return f"![{alt}]({light}#only-light)\n![{alt}]({dark}#only-dark)"

    return LINK.sub(address, PICTURE.sub(both, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Let long names in cells break after a dot, slash or underscore, numbers before a range."""
    html = re.sub(r'(?<=right;">)([^<(]+) \(', r"\1<wbr> (", html)
    return CODE_OF_CELL.sub(lambda code: re.sub(r"(?<=\w[._/])(?=\w)", "<wbr>", code[0]), html)


def command_text(name: str, shown: set[str]) -> str:
    """Section on a command: tables of its options, from the config that its parser is given.

    Tables of nested configs that are shown already are only named.
    """
    with patch("tyro.cli", side_effect=SystemExit) as parser, suppress(SystemExit):
        run([name, "--help-all"])
    default = parser.call_args.kwargs.get("default")
    parts, known = [f"## dotmoe {name}", COMMANDS[name].help], list[str]()
    for key, table in options_of(parser.call_args.args[0], default):
        if table in shown:
            known.append(f"`{key}`")
        else:
            parts += [f"### `{key}` {{ #{name}-{key} }}"] * bool(key) + [table]
        shown.add(table)
    parts += [f"{', '.join(known)}: as above."] * bool(known)
    return "\n\n".join(parts)


def options_of(cls: Any, default: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Key and table of a config's options, then those of the configs in it."""
    bases = [base for base in reversed(cls.__mro__) if is_dataclass(base)]
    parsed = [p for base in bases for p in docstring_parser.parse_from_object(base).params]
    texts = {p.arg_name: p.description for p in parsed if p.description}
    rows = ["| option | default | what it does |", "| --- | --- | --- |"]
    nested = list[tuple[str, str]]()
    for field, (name, kind, marks) in zip(fields(cls), marked_fields(cls), strict=True):
        value = getattr(default, name) if default is not None else field.default
        if value is MISSING and field.default_factory is not MISSING:
            value = field.default_factory()
        if is_dataclass(kind):
            nested += options_of(kind, value, f"{key}{name}")
        elif tyro.conf.Suppress not in marks:
            place = next((m.metavar for m in marks if getattr(m, "metavar", None)), None)
            shown = place or f"--{name.replace('_', '-')}"
            rows.append(option_row(shown, kind, value, marks, texts.get(name) or ""))
    if len(rows) > 2:
        yield key, "\n".join(rows)
    yield from nested


def option_row(shown: str, kind: Any, value: Any, marks: Any, text: str) -> str:
    """Row of a table: the option, its default, and what it does with its choices and range."""
    choices = [c for k in (kind, *get_args(kind)) if get_origin(k) is Literal for c in get_args(k)]
    said = [" ".join(text.split())]
    said += [f"One of {', '.join(f'`{c}`' for c in choices)}."] * bool(choices)
    said += [f"Range: {mark.words}." for mark in marks if isinstance(mark, Range)]
    is_given = value not in (None, MISSING, tyro.MISSING, (), "")
    given = " ".join(map(str, value)) if isinstance(value, tuple) else value
    cells = (f"`{shown}`", f"`{given}`" if is_given else "", " ".join(said))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
