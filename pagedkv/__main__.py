"""`pagedkv` and `python -m pagedkv`. What is imported before Ctrl-C is heard is next to nothing."""

import sys


def main() -> int:
    """Run the command line on sys.argv and return the exit status: 130, without a word, for Ctrl-C at any moment."""
    try:
        import signal

        from pagedkv.cli import main as run

        status = run()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # or the end of the interpreter would print a traceback
        return status
    except BaseException as error:
        from pagedkv.process import interrupted

        if interrupted(error):
            return 130
        raise


if __name__ == "__main__":
    sys.exit(main())
