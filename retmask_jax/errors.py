"""The one exception that means: the user can mend this."""


class UserError(Exception):
    """A mistake in a config, a file or a command line.

    The message is one line that names the file, row or field and says what to do. The command line
    prints it as `retmask: error: …` and exits with status 2; no traceback is shown.
    """
