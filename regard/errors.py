"""The exception for errors that a user can fix."""


class RegardError(Exception):
    """An error that the user can fix; its message says in one line what is wrong, where, and what to do next.

    The command line prints it without a traceback and exits with code 2.
    """
