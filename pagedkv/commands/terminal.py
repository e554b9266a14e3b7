"""Who is watching."""

import sys


def on_terminal() -> bool:
    """Whether a person watches standard error, so that progress bars and closing lines make sense."""
    return sys.stderr is not None and sys.stderr.isatty()
