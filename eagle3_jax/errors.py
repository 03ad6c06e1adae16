"""The one exception type raised for everything this library refuses."""


class Eagle3Error(ValueError):
    """A refusal: one line that says what is wrong and what would be right.

    The command line prints it without a traceback and exits with code 2.
    """
