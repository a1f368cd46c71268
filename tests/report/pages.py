"""A page as Python's own HTML parser sees it."""

from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "<script>alert(1)</script> & <img src='http://evil/a.png'> \"[/red]"
VOID = {"meta", "img"}


class Page(HTMLParser):
    """Elements, attributes and text of a page; fails on tags that do not match."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.pieces, self.commands = [], [], [], []
        self.feed(source)
        self.close()
        assert not self.open, f"never closed: {self.open}"
        self.text = " ".join(" ".join(self.pieces).split())
        self.tags = [tag for tag, _ in self.elements]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "pre" and ("class", "command") in attrs:
            self.commands.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.pieces.append(data)
        if self.open[-2:] == ["pre", "code"]:
            self.commands[-1] += data

    def values_of(self, attribute):
        return [attrs[attribute] for _, attrs in self.elements if attribute in attrs]


def read_page(path):
    return Page(path.read_text(encoding="utf-8"))
