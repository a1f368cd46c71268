"""The error that a user can cause and mend, and the end that a signal asked for."""


class UserError(ValueError):
    """Bad input: one line with the value, the rule, the place and the remedy.

    The command line prints the message alone and exits with status 2; from Python it is an
    ordinary `ValueError`. Anything else that escapes is a defect of ours and keeps its traceback.
    """


class RankError(UserError):
    """A `UserError` on one rank alone, which tells it itself; others are told by the first rank."""


class Interrupted(KeyboardInterrupt):
    """Training was asked by a signal to stop, saved a checkpoint, and stopped."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum
        """Number of the signal."""
