"""Errors that a user can cause and fix, and the words they are told in."""

from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec


class UserError(ValueError):
    """Bad input: one line with the value, the rule, the place and the remedy.

    The command line prints the message alone and exits with status 2; from Python it is an
    ordinary `ValueError`. Anything else that escapes is a defect of ours and keeps its traceback.
    """

    exit_code = 2
    """Exit status of the command."""


class VerificationError(UserError):
    """An export does not compute what it should; it is kept, and named unverified."""

    exit_code = 3


class RankError(UserError):
    """A `UserError` of one rank alone, which prints it; rank zero prints those of all ranks."""


class Interrupted(KeyboardInterrupt):
    """Training was asked by a signal to stop, saved a checkpoint, and stopped."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


def require_package(name: str, extra: str, what: str) -> None:
    """Refuse to go on without a package of one of our extras, which `what` needs."""
    if find_spec(name) is None:
        raise UserError(
            f"{what} needs the {name} package, which is not installed. "
            f"Run pip install -e '.[{extra}]' in the checkout."
        )


def nearest(name: str, names: Iterable[str]) -> str:
    """` Did you mean X?` with the name that is most like `name`, or nothing if none is close."""
    near = get_close_matches(name, list(names), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def one_line(error: object) -> str:
    """The text of an error on one line."""
    return " ".join(str(error).split())
