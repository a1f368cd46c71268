"""Hooks of mkdocs, see mkdocs.yml.

The site's first page is README.md. A file that a page links to outside of docs/ gets into the site,
with its own links. The page on commands shows their help texts.
"""

import os
import re
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mkdocs.structure.files import File

from dotmoe.cli import COMMANDS, run

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:)[^)#\s]+|(?<=src=\"|set=\")[^\"]+\.svg")
COMMANDS_GO_HERE = "<!-- commands -->"
CODE_COLUMNS = 84
"""Characters of a line of code that fit into the site; see site.css."""
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
                if path.endswith(".md"):
                    waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links lead to the site's addresses, and put the commands in."""
    uri = page.file.src_uri
    if COMMANDS_GO_HERE in markdown:
        markdown = markdown.replace(COMMANDS_GO_HERE, "\n\n".join(map(command_text, COMMANDS)))

    def address(link: re.Match[str]) -> str:
        return os.path.relpath(address_of(target_of(uri, link[0])), os.path.dirname(uri) or ".")

    def both(picture: re.Match[str]) -> str:
        light, alt = re.findall(r'(?:src|alt)="([^"]+)"', picture[0])
        dark = light.replace(".svg", "-dark.svg")
        narrow = light.replace(".svg", "-narrow.svg")
        narrow_dark = light.replace(".svg", "-narrow-dark.svg")
        if narrow not in picture[0]:
            return f"![{alt}]({light}#only-light)\n![{alt}]({dark}#only-dark)"
        of_phones = {f"{light}#only-light": narrow, f"{dark}#only-dark": narrow_dark}
        return "\n".join(
            f'<picture><source media="(max-width: 600px)" srcset="{small}">'
            f'<img src="{wide}" alt="{alt}"></picture>'
            for wide, small in of_phones.items()
        )

    return LINK.sub(address, PICTURE.sub(both, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Let long names in cells break after a dot, slash or underscore, numbers before a range."""
    html = re.sub(r'(?<=right;">)([^<(]+) \(', r"\1<wbr> (", html)
    return CODE_OF_CELL.sub(lambda code: re.sub(r"(?<=\w[._/])(?=\w)", "<wbr>", code[0]), html)


def command_text(name: str) -> str:
    """Section on a command: what `--help-all` prints."""
    width = patch.dict(os.environ, COLUMNS=str(CODE_COLUMNS))
    with width, redirect_stdout(StringIO()) as printed, suppress(SystemExit):
        run([name, "--help-all"])
    return f"## dotmoe {name}\n\n```\n{printed.getvalue()}```"
