"""A command line: its help, and its arguments as a checked config.

Nothing here imports PyTorch, which takes seconds to load.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dotmoe.cli import help as help_texts
from dotmoe.cli.options import Option, options_of, summary_of
from dotmoe.cli.start import CONFIGS, command_options, start_of, with_open_defaults, with_start
from dotmoe.cli.table import COMMANDS
from dotmoe.common.errors import UserError, nearest
from dotmoe.common.options import built, check, marked_fields, require_effect
from dotmoe.run.config import overridden

Config = TypeVar("Config")

_HELP = ("-h", "--help", "--help-all")


class _Parsed(NamedTuple):
    """A command line: its words, and which of them belong to an option."""

    words: Sequence[str]
    options: dict[str, Any]
    """Words of each option that is given, by its name; True or False for a flag."""
    arguments: list[str]
    """Words that belong to no option, in order."""


def config_of(command: str, line: Sequence[str]) -> Any:
    """The words after a command as its checked config.

    Raises SystemExit after help; for a wrong word a UserError, with the nearest option or choice if
    there is one.
    """
    options = command_options(command)
    try:
        words = _known(f"dotmoe {command}", line, options)
        asked = [word for word in words if word in _HELP]
        if asked:
            words = [word for word in words if word not in _HELP]
            print(_help(command, words, is_whole="--help-all" in asked))
            raise SystemExit(0)
        given = _parsed(words, options)
        start = start_of(command, given.options)
        config = _config(
            f"dotmoe {command}", CONFIGS[command], options, given, start.config, start.named
        )
        config = with_open_defaults(overridden(config, given.options), start, given.options)
    except UserError as error:
        raise UserError(f"{error} See dotmoe {command} --help.") from error
    check(config, given.options)
    require_effect(config, start.unused, given.options.get("config", ""))
    return config


def settings(cls: type[Config], about: str | None) -> Config:
    """The command line of a script as its config.

    Raises SystemExit after help and after an error, as scripts do.
    """
    program, words = Path(sys.argv[0]).name, sys.argv[1:]
    options = tuple(options_of(cls))
    if any(word in _HELP for word in words):
        paragraphs = [" ".join(each.split()) for each in (about or "").split("\n\n")]
        print(help_texts.of_options(program, paragraphs, options, _groups(cls)))
        raise SystemExit(0)
    try:
        given = _parsed(_known(program, words, options), options)
        config: Config = _config(program, cls, options, given, None, {})
    except UserError as error:
        raise SystemExit(f"{program}: error: {error}") from error
    return config


def as_typed(message: str, command: str, line: Sequence[str]) -> str:
    """A message with the names of options as they are typed: `--seq-len`, not `seq_len`.

    Keys of a JSON file and of a config that differs keep their names.
    """
    names = [each.name for each in command_options(command) if not each.is_argument]
    long = "|".join(name for name in names if "_" in name)
    if not long:
        return message
    dashed = re.sub(
        rf"(?<![\w./'\"-])({long})(?![\w./'\"=]*[\w/'\"=])(?! in \S*json| \()",
        lambda found: "--" + found[0].replace("_", "-"),
        message,
    )
    first, _, rest = dashed.partition(" ")
    if first in names and first not in line and rest.startswith(("is ", "names ")):
        return f"--{dashed}"
    return dashed


def _known(program: str, line: Sequence[str], options: Sequence[Option]) -> list[str]:
    """The words of a line, options with dashes.

    Raises a `UserError` for an option that the program does not have, and for one given twice: only
    one of its values would have an effect.
    """
    words, given = list[str](), set[str]()
    names = {**_names(options), **{word: word for word in _HELP}}
    for word in line:
        option, equals, value = word.partition("=")
        option = option.replace("_", "-")
        if not re.fullmatch(r"--?[a-z][\w-]*", option):
            words.append(word)
            continue
        if option not in names:
            raise UserError(
                f"{option} is no option of {program}.{_hint(option, names) or ' Leave it out.'}"
            )
        words.append(option + equals + value)
        name = names[option]
        if name in given and name not in _HELP:
            raise UserError(f"{name} is given twice. Give it once{_with_all(name, options)}.")
        given.add(name)
    return words


def _with_all(name: str, options: Sequence[Option]) -> str:
    """What to say of an option of several values: `--data` is followed by all of them."""
    takes_many = any(each.takes_many for each in options if each.typed == name)
    return ", with all its values" if takes_many else ""


def _hint(option: str, names: Iterable[str]) -> str:
    """The commands that have an option which this one lacks, or else its nearest one."""
    others = [f"dotmoe {each}" for each in COMMANDS if option in _names(command_options(each))]
    if others:
        return f" It is one of {', '.join(others)}."
    return nearest(option if option.startswith("--") else f"-{option}", names)


def _names(options: Sequence[Option]) -> dict[str, str]:
    """Every option by each way to type it: `--no-repair` is `--repair`."""
    names = {each.typed: each.typed for each in options if not each.is_argument}
    return names | {f"--no-{each.typed[2:]}": each.typed for each in options if each.is_flag}


def _parsed(words: Sequence[str], options: Sequence[Option]) -> _Parsed:
    """The words of each option, and those of none."""
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS
    )
    for each in options:
        if each.is_argument:
            continue
        if each.is_flag:
            parser.add_argument(
                each.typed,
                dest=each.name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
            )
        else:
            parser.add_argument(each.typed, dest=each.name, nargs="*" if each.takes_many else None)
    try:
        given, arguments = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        option = error.argument_name
        if option in [each.typed for each in options if not each.is_flag]:
            raise UserError(f"{option} has no value ({error.message}). Give one.") from error
        raise UserError(f"{option} takes no value. Leave it out.") from error
    return _Parsed(words, vars(given), [word for word in arguments if word != "--"])


def _config(
    program: str,
    cls: Any,
    options: Sequence[Option],
    given: _Parsed,
    start: Any,
    named: dict[str, str],
) -> Any:
    """The words as a config of a class, which is not checked yet."""
    required = [each for each in options if each.is_argument and each.is_required]
    open_ones = [each for each in required if each.name not in named]
    _move_last_words(given, options, len(open_ones) - len(given.arguments))
    missing = open_ones[len(given.arguments) :]
    missing += [
        each
        for each in options
        if each.is_required and not each.is_argument and each.name not in given.options
    ]
    if missing:
        texts = ", ".join(f"{each.typed} ({each.help.rstrip('.')})" for each in missing)
        raise UserError(f"Missing from {program}: {texts}.")
    values: dict[str, Any] = dict(named)
    places = _places(options, given.arguments, open_ones)
    if len(given.arguments) > len(places):
        raise UserError(_too_many(given.arguments[len(places)], given.words, options))
    for each, word in zip(places, given.arguments, strict=False):
        values[each.name] = each.value(word)
    for each in options:
        if each.name in given.options:
            values[each.name] = each.value(given.options[each.name])
    return built(cls, start, values)


def _places(
    options: Sequence[Option], words: Sequence[str], open_ones: Sequence[Option]
) -> Sequence[Option]:
    """The arguments that words stand for, in order.

    Where a recipe names MODEL, one word is OUT, and two are MODEL and OUT.
    """
    required = [each for each in options if each.is_argument and each.is_required]
    optional = [each for each in options if each.is_argument and not each.is_required]
    if len(words) >= len(required):
        return required + optional
    if len(words) == len(open_ones):
        return open_ones
    return required[len(required) - len(words) :]


def _move_last_words(given: _Parsed, options: Sequence[Option], num_lacking: int) -> None:
    """Make arguments of the last words of a line, if they are lacking: `--data a.txt MODEL OUT`."""
    typed = [word.partition("=")[0] for word in given.words]
    last = next((word for word in reversed(typed) if word.startswith("--")), None)
    for each in options:
        found = given.options.get(each.name, [])
        if each.typed == last and each.takes_many and 0 < num_lacking < len(found):
            given.arguments.extend(found[-num_lacking:])
            del found[-num_lacking:]


def _too_many(extra: str, words: Sequence[str], options: Sequence[Option]) -> str:
    """What is wrong with a word that no argument is left for."""
    before = next((word for word, after in pairwise(words) if after == extra), "")
    flags = _names([each for each in options if each.is_flag])
    remedy = f"{before} takes no value" if before in flags else "Leave it out"
    return f"{extra} is one word too many. {remedy}."


def _help(command: str, words: Sequence[str], *, is_whole: bool) -> str:
    """The help of a command, with the defaults of the recipe among the words."""
    about = COMMANDS[command]
    cls = CONFIGS[command]
    start = start_of(command, {}).config
    with suppress(UserError):
        start = start_of(command, _parsed(words, command_options(command)).options).config
    return help_texts.of_options(
        f"dotmoe {command}",
        [about.help, *about.notes],
        with_start(command, tuple(options_of(cls, start))),
        _groups(cls),
        getattr(cls, "needs", ()),
        () if is_whole else about.common,
    )


def _groups(cls: Any) -> dict[str, str]:
    """What each config nested in a class is, by the name of its field."""
    return {name: summary_of(kind) for name, kind, _ in marked_fields(cls) if is_dataclass(kind)}
