"""The one exception of everything that reads model files."""

_MAX_CHARS = 500


class ModelError(ValueError):
    """A model file, its metadata or its tokenizer cannot be used.

    The message is one printable line naming what, where and the bound; what files say is escaped and cut.
    """

    def __init__(self, message: str):
        if len(message) > _MAX_CHARS:
            message = f"{message[: _MAX_CHARS // 2]} ... {message[-_MAX_CHARS // 2 :]}"
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))
