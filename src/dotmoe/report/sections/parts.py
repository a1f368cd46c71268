"""What the sections are made of."""

import shlex
from dataclasses import dataclass

from dotmoe.report.elements import Markup, element, joined
from dotmoe.report.plots import Plot
from dotmoe.report.result_files import ResultFiles

TEXT = "HELD_OUT.txt"
"""Stands in a command for a text that the reader must name."""

DENSE = "DENSE_MODEL"
"""Stands in a command for the dense model, where no file names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A piece of the page with a title."""

    title: str
    body: Markup


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """Something that was not measured."""

    what: str
    command: str
    """Measures it."""


Part = Section | Missing


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What a section is made from."""

    found: ResultFiles
    plots: dict[str, Plot]

    def plot(self, name: str, caption: str) -> Markup:
        """A plot with what is to be seen in it; nothing where it was not drawn."""
        if name not in self.plots:
            return Markup()
        drawing = Markup(self.plots[name].in_page(name.replace("_", "-"), caption))
        return element("figure", drawing, element("figcaption", caption))

    @property
    def run(self) -> str:
        """The run folder, for a command."""
        return str(self.found.run)

    @property
    def texts(self) -> list[str]:
        """The text that the run was measured on, for a command."""
        return [str(text) for text in self.found.results["dense"].get("text", ())] or [TEXT]

    @property
    def dense(self) -> str:
        """The dense model, for a command."""
        return self.found.dense_model or DENSE

    def evaluation(self, *options: str) -> str:
        """A command line of `dotmoe evaluate` that keeps its result in the run."""
        kept = str(self.found.run / "6_evaluate")
        return shlex.join(["dotmoe", "evaluate", self.run, *options, "--out", kept])


def side_by_side(*pieces: Markup) -> Markup:
    """Pieces in two columns where the screen is wide enough."""
    return element("div", joined(piece for piece in pieces if piece), class_="beside")
