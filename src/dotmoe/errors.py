"""The error that a user can cause and mend."""


class UserError(ValueError):
    """Bad input: one line with the value, the rule, the place and the remedy.

    The command line prints the message alone and exits with status 2; from Python it is an
    ordinary `ValueError`. Anything else that escapes is a defect of ours and keeps its traceback.
    """
