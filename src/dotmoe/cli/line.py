"""A command line: its help, and its arguments as a checked config.

Nothing here imports PyTorch, which takes seconds to load.
"""

import argparse
import io
import os
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple
from unittest.mock import patch

import docstring_parser
import tyro

from dotmoe.cli import COMMANDS
from dotmoe.common.errors import UserError, nearest
from dotmoe.common.files import DamagedError, read_json
from dotmoe.common.options import check, from_values, marked_fields
from dotmoe.measure import config as measuring
from dotmoe.method.config import AlignConfig
from dotmoe.run import config as running
from dotmoe.run.config import RECIPES, RunConfig, recipe_of

_HELP_COLUMNS, _ALL_COLUMNS = 100, 10_000
"""Width of help texts; and a width that no error or table exceeds, so that none is wrapped."""
_CONFIGS = {
    "quickstart": running.QuickstartConfig,
    "inspect": measuring.InspectConfig,
    "convert": running.RunConfig,
    "compare": running.CompareConfig,
    "finetune": running.FinetuneRunConfig,
    "export": running.ReexportConfig,
    "evaluate": measuring.EvaluateConfig,
    "analyse": measuring.AnalyseConfig,
    "bench": measuring.BenchConfig,
    "report": measuring.ReportConfig,
}
"""The class of each command's options."""
_NOTES = {
    "convert": "Defaults are those of --recipe default, which does not align; paper and those with "
    "a model's name are the paper's settings, small and quickstart align small models. MODEL may "
    "be left out where a recipe or config names it: --recipe llama2_7b OUT.",
    "finetune": "Defaults are those of --recipe default: distillation from the dense model with "
    "fixed routers, as measured on a model of 135M parameters. paper is the paper's training "
    "on 1.2B tokens, sft the same with our gradient of the routers, small is for models of a few "
    "million parameters.",
    "evaluate": """
Asked for together, these are measured one after the other:
perplexity: --text FILE, with --window, --max-tokens, --protocol.
benchmark tasks: --tasks NAME, with --task-data, --shots, --limit, --max-length, --chat-template.
samples: --generate TOKENS --prompts TEXT, with --temperature, --chat-template.
closeness to the dense model: --fidelity --text FILE.
perplexity at other numbers of active experts: --curve --text FILE, without --against.""",
    "export": """
glm4_moe: runs in Transformers, vLLM, SGLang; k can be edited.
mixtral: runs in Transformers, vLLM, SGLang, llama.cpp's converter; k is fixed.
qwen3_moe: runs in Transformers, vLLM, SGLang, llama.cpp's converter; k is fixed.
qwen3_5_moe_text: runs in Transformers; k is fixed.
granitemoe: runs in Transformers, vLLM, SGLang; k is fixed.
flex_olmo: runs in Transformers, vLLM, SGLang; k is fixed.
dotmoe: runs in Transformers (trust_remote_code=True), vLLM (--trust-remote-code --enforce-eager);
k can be edited.
gguf: for llama.cpp, gguf_glm4moe (gates exactly 1) or gguf_llama; k can be edited.""",
}
"""What help says of the recipes of commands that have some, and of the formats of `export`."""


class Line(NamedTuple):
    """A command line: the name of the command and its arguments."""

    name: str
    arguments: tuple[str, ...]

    def config(self) -> Any:
        """The arguments as a checked config of the command.

        Names of nested fields must differ because prefixes are omitted. Raises SystemExit after
        help; for a wrong argument a UserError, with the nearest option or choice if there is one.
        """
        self._require_options()
        command, arguments, start = COMMANDS[self.name], list(self.arguments), None
        named: list[str] = []
        if command.recipes:
            start, named, arguments = self._start(command.recipes)
            values = {field.name: getattr(start, field.name) for field in fields(start)}
            if self.name == "compare":  # from the options of its runs
                values["method"] = "dot_moe"
            if self.name == "inspect":
                values["out"] = ""
            start = _CONFIGS[self.name](**values)
        # Where options come first, they may have taken names: then what is named is left out first.
        typed = next((i for i, w in enumerate(arguments) if w[:1] == "-"), len(arguments))
        most = 1 if self.name == "inspect" else 2
        lacking = range(most, -1, -1) if typed == 0 else [max(0, most - typed)]
        wrong = list[UserError]()
        for number in sorted({min(each, len(named)) for each in lacking}, reverse=True):
            try:
                return self._parsed(start, [*named[:number], *arguments])
            except UserError as error:
                wrong.append(error)
        raise wrong[0]

    def _parsed(self, start: Any, arguments: list[str]) -> Any:
        command = COMMANDS[self.name]
        notes = _NOTES.get(command.recipes or self.name, "").replace("\n", "\n\n")
        help_option = next((w for w in arguments if w in ("-h", "--help", "--help-all")), None)
        errors, output = io.StringIO(), io.StringIO()
        width = patch.dict(os.environ, COLUMNS=str(_HELP_COLUMNS if help_option else _ALL_COLUMNS))
        texts = patch("docstring_parser.parse_from_object", _attributes_in_one_line)
        try:  # tyro writes plain ASCII to files without an encoding
            with width, texts, redirect_stderr(errors), redirect_stdout(output):
                config = tyro.cli(
                    _CONFIGS[self.name],
                    prog=f"dotmoe {self.name}",
                    description=f"{command.help} {notes}".strip(),
                    args=["--help"] if help_option else arguments,
                    config=(tyro.conf.OmitArgPrefixes,),
                    **({} if start is None else {"default": start}),
                )
        except SystemExit as stop:
            if not help_option:
                line = _in_one_line(errors.getvalue(), arguments)
                raise UserError(f"{line} See dotmoe {self.name} --help.") from stop
            # tyro wraps options, but not the description; help texts explain a default of None.
            whole = re.sub(r"\s+\(default:\s*(None)?\)", "", output.getvalue())
            lines = (fill(line, _HELP_COLUMNS) for line in whole.splitlines())
            text, is_short = "\n".join(lines), help_option != "--help-all" and command.common
            if command.recipes:
                text = _with_starts(text, command.recipes)
            print(_short_help(text, command.common) if is_short else text)
            raise
        check(config)
        self._require_used(config)
        return config

    def _typed(self) -> list[str]:
        """The options among the arguments, with dashes, also those that do not exist."""
        words = [word.partition("=")[0].replace("_", "-") for word in self.arguments]
        return [word for word in words if re.fullmatch(r"--?[a-z][\w-]*", word)]

    def _require_options(self) -> None:
        """Refuse an option that the command does not have, whatever else is wrong."""
        names = _option_names(self.name)
        for word in self._typed():
            if word not in names:
                of_others = [f"dotmoe {name}" for name in COMMANDS if word in _option_names(name)]
                hint = nearest(f"-{word}" if word[1] != "-" else word, names)
                if of_others:
                    hint = f" It is one of {', '.join(of_others)}."
                raise UserError(
                    f"{word} is no option of dotmoe {self.name}.{hint or ' Leave it out.'} "
                    f"See dotmoe {self.name} --help."
                )

    def _require_used(self, config: Any) -> None:
        """Refuse an option of the alignment in a conversion that does not align."""
        typed = self._typed()
        if self.name not in ("convert", "inspect") or config.align.steps or "--steps" in typed:
            return
        options = {f"--{field.name.replace('_', '-')}" for field in fields(AlignConfig)}
        unused = [word for word in typed if word in options] * (config.method == "dot_moe")
        if unused:
            raise UserError(
                f"{unused[0]} is an option of the alignment, which is off. Give --steps as well, "
                f"or finetune the converted model with dotmoe finetune, or leave {unused[0]} out."
            )

    def _start(self, command: str) -> tuple[Any, list[str], list[str]]:
        """The config of --recipe or --config, the names in it (MODEL, OUT), other arguments."""
        start = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        start.add_argument("--recipe")
        start.add_argument("--config", type=Path)
        try:
            chosen, rest = start.parse_known_args(self.arguments)
        except argparse.ArgumentError as error:
            raise UserError(f"{error}. See dotmoe {self.name} --help.") from error
        if chosen.recipe and chosen.config:
            raise UserError("--recipe and --config both name a starting config. Give one of them.")
        config = recipe_of(command, chosen.recipe)
        if chosen.config:
            try:
                values = read_json(chosen.config)
            except DamagedError as error:
                raise UserError(f"{error}. Name the config.json of a run.") from error
            config = from_values(type(config), values, str(chosen.config))
            if isinstance(config, RunConfig):  # its repair is the one that the time allowed
                config = replace(config, time=None)
        places = ("model" if command == "convert" else "run", "out")
        named = [name for place in places if (name := getattr(config, place))]
        return replace(config, **dict.fromkeys(places, tyro.MISSING)), named, rest


@lru_cache
def _option_names(command: str) -> frozenset[str]:
    """Every option of a command, as it is typed."""
    names = {"-h", "--help", "--help-all"}
    names.update(["--recipe", "--config"] if COMMANDS[command].recipes else [])

    def add(cls: Any) -> None:
        for name, kind, marks in marked_fields(cls):
            option = name.replace("_", "-")
            if is_dataclass(kind):
                add(kind)
            elif tyro.conf.Positional not in marks and tyro.conf.Suppress not in marks:
                names.update([f"--{option}", *[f"--no-{option}"] * (kind is bool)])

    add(_CONFIGS[command])
    return frozenset(names)


def _attributes_in_one_line(
    obj: Any, parse: Callable[..., Any] = docstring_parser.parse_from_object
) -> Any:
    """Docstrings with each attribute on one line, because tyro keeps breaks before an indent."""
    parsed = parse(obj)
    for attribute in parsed.params:
        attribute.description = " ".join((attribute.description or "").split()) or None
    return parsed


def _with_starts(text: str, command: str) -> str:
    """Tyro's help with --recipe and --config below --help, in its columns."""
    says = {
        "  --recipe NAME": f"Settings to start from: {', '.join(RECIPES[command])}. Other options "
        "override them.",
        "  --config FILE": "config.json of an earlier run to start from, instead of a recipe.",
    }

    def below(option: re.Match[str]) -> str:
        indent = " " * len(option[1].splitlines()[-1])
        texts = (name.ljust(len(indent)) + said for name, said in says.items())
        blocks = (fill(text, _HELP_COLUMNS, subsequent_indent=indent) for text in texts)
        return "\n".join([option[0], *blocks])

    return re.sub(r"^(  -h, --help\s+)show.*$", below, text, flags=re.MULTILINE)


def _short_help(text: str, common: Sequence[str]) -> str:
    """Usage, description and common options of a command, cut out of its full help."""
    head, _, rest = text.partition(" positional arguments")
    starts = r"  (--[\w-]+|[A-Z]+(?= |$))"
    matches = re.finditer(rf"^{starts}.*(?:\n(?!{starts}|\s*$).+)*", rest, re.MULTILINE)
    blocks = {match[1]: re.sub(r" +$", "", match[0], flags=re.MULTILINE) for match in matches}
    names = [name for name in blocks if not name.startswith("--")]
    shown = [blocks[name] for name in (*names, *(f"--{option}" for option in common))]
    number = len(blocks) - len(names) + 1  # with --help
    return "\n".join([head.rstrip(), "", *shown, f"  {'--help-all':<24}show all {number} options"])


def _in_one_line(output: str, arguments: Sequence[str]) -> str:
    """Tyro's error in one sentence, with the nearest choice if there is one."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    sections = re.split(r"^ +-+ *$", plain, flags=re.MULTILINE)
    title, text, *_ = (" ".join(section.split()) for section in sections)
    first, *others = re.findall(r"'([^']*)'", text) or [""]
    option = re.search(r"--[\w-]+", text)
    if title == "Required options":
        return re.sub(r" ([A-Z]+) (.*?)\.? \(required\)", r" \1 (\2),", text).rstrip(",") + "."
    if title == "Missing argument":
        return f"{option[0] if option else first} has no value. Give one."
    if title == "Unrecognized options":
        extra = text.partition(": ")[2].split(", ")[0]
        before = dict(pairwise(reversed(arguments))).get(extra, "")
        remedy = f"{before} takes no value" if before.startswith("--") else "Leave it out"
        return f"{extra} is one word too many. {remedy}."
    if title == "Value error" and option:
        kind = "whole number" if re.search(rf"{option[0]} .{{,12}}INT", plain) else "number"
        percent = re.fullmatch(r"(\d+)%", first)
        hint = f" Did you mean {int(percent[1]) / 100:g}?" if percent else ""
        return f"{option[0]} is {first!r}, but it must be a {kind}.{hint}"
    return f"{text.rstrip('.')}.{nearest(first, others)}"
