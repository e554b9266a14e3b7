"""The one exception of everything that reads model files."""

_MAX_CHARS = 500


class ModelError(ValueError):
    """A model file, its metadata or its tokenizer cannot be used.

    The message is one printable line naming what, where and the bound; what files say is escaped and cut.
    """

    def __init__(self, message: str):
        # cut before and after: escaping makes characters longer, and must not work through a whole file
        message = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in _cut(message))
        super().__init__(_cut(message))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS // 2]} ... {text[-_MAX_CHARS // 2 + 5 :]}"
