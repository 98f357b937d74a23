"""The one exception a user is meant to read."""


class RegardError(Exception):
    """Something the user can mend: says what is wrong, where, and what to do next, in one line.

    The command line prints it without a traceback and exits with code 2.
    """
