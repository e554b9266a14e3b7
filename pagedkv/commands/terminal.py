"""What may be shown to a person."""

import re
import sys

# Line ends and tabs are harmless; the others could move the cursor, retitle the window or type for the user.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def shown_safely(text: str) -> str:
    """`text` for standard output: at a terminal control characters are replaced, elsewhere nothing is changed."""
    return _CONTROLS.sub("\ufffd", text) if sys.stdout.isatty() else text
