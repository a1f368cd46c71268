"""What is raised when an export is not what it should be."""

from dotmoe.errors import UserError


class VerificationError(UserError):
    """The exported model does not compute what it should."""
