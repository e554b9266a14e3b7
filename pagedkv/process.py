"""The process around a command: standard streams, which may be closed, who watches them, and Ctrl-C."""

import os
import sys


def open_standard_streams() -> None:
    """Point closed standard streams at the null device; to be called before anything else opens a file.

    Otherwise the next files opened would get descriptors 0 to 2, and a library's warning would be written into them.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this one
            os.set_inheritable(opened, True)
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8", errors="replace")  # noqa: SIM115  for good
            setattr(sys, name, stream)


def on_terminal() -> bool:
    """Whether a person watches standard error, so that progress bars and closing lines make sense."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, as under pythonw or `2>&-`, or it is closed
        return False


def tell(line: str) -> None:
    """Print a line to standard error, and nothing anywhere when there is none."""
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)


def flush_or_discard() -> None:
    """Flush standard output and error; one that cannot take it is pointed at the null device, so that the interpreter,
    which flushes again at its end, does not fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)


def interrupted(error: BaseException | None) -> bool:
    """Whether an error is Ctrl-C, or came of it: some imports turn what stops them into an error of another kind."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
