"""Errors that a user can cause and fix, and helpers for their messages."""

import os.path
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path


class UserError(ValueError):
    """Bad input: one line with the value, the rule, the place and the remedy.

    The command line prints the message alone and exits with status 2; from Python it is an
    ordinary `ValueError`. Any other exception that escapes is a bug and keeps its traceback.
    """

    exit_code = 2
    """Exit status of the command."""


class VerificationError(UserError):
    """An export does not compute what it should; it is kept as `OUT_unverified`."""

    exit_code = 3


class RankError(UserError):
    """A `UserError` on one rank only, which prints it; rank zero prints those that all raise."""


class Interrupted(KeyboardInterrupt):
    """A signal stopped the command; a training saves a checkpoint before it raises this."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


def require_package(name: str, extra: str, what: str) -> None:
    """Raise a `UserError` if package `name` of dotmoe's `extra`, which `what` needs, is missing."""
    if find_spec(name) is None:
        raise UserError(
            f"{what} needs the {name} package, which is not installed. "
            f"Run pip install -e '.[{extra}]' in the checkout."
        )


def nearest(name: str, names: Iterable[str]) -> str:
    """` Did you mean X?` with the name most similar to `name`; empty if none is close."""
    near = get_close_matches(name, list(names), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def nearest_beside(path: Path) -> str:
    """As `nearest`, among what the folder of `path` holds; empty if there is no such folder."""
    folder = path.parent
    if not os.path.isdir(folder):
        return ""
    return nearest(str(path), (str(each) for each in folder.iterdir() if each != path))


def one_line(error: object) -> str:
    """The text of an error on one line."""
    return " ".join(str(error).split())
