"""What is raised when an export is not what it should be."""

from dotmoe.errors import UserError


class VerificationError(UserError):
    """The exported model does not compute what it should."""

    exit_code = 3
    """Exit status of the command: what was paid for is kept, but must be looked at."""
