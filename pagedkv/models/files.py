"""What opens the files of a model: every read is checked, and no byte of a model is ever mapped."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from pagedkv.models.errors import ModelError

MAX_SMALL_BYTES = 1 << 26


def read_small(path: str | os.PathLike, limit: int = MAX_SMALL_BYTES) -> bytes:
    """All bytes of a regular file of up to `limit` bytes: whatever of a model is read whole comes through here.

    Raises ModelError naming the file. Neither a pipe nor a device nor a file without end can make it wait or take
    memory: the kind and the size are known before the first byte is read.
    """
    with ModelFile(path) as file:
        if file.n_bytes > limit:
            raise ModelError(f"{file.path}: {file.n_bytes} bytes, at most {limit} are allowed")
        found = bytearray()
        try:
            while more := os.pread(file.fileno(), file.n_bytes - len(found), len(found)):
                found += more
        except OSError as error:
            raise ModelError(f"{file.path}: {error.strerror or error}") from None
        return bytes(found)


class ModelFile:
    """A regular file, open for reading. Use as a context manager or call `close`.

    .path      Path
    .n_bytes   its size when it was opened

    Others may rename or delete the file meanwhile: what was opened stays readable. When they cut it short, a read
    raises ModelError, one line with the path, what was read, and the bytes expected and found. When they write into
    it, `check_unchanged` tells. Raises ModelError, also for what is no regular file.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._fd = -1
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self._fd)
        except OSError as error:
            self.close()
            raise ModelError(f"{self.path}: {error.strerror or error}") from None
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise ModelError(f"{self.path}: not a regular file")
        self.n_bytes = status.st_size
        self._stamp = status.st_mtime_ns

    def __enter__(self) -> "ModelFile":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Idempotent; a later read raises ModelError."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    def fileno(self) -> int:
        """The file descriptor, for a reader of its own inside `reading`; -1 when closed."""
        return self._fd

    def read(self, what: str, offset: int, n: int) -> bytes:
        """The n bytes from `offset` on, which are `what` in messages. Copies; releases the GIL."""
        # here and not above: what only looks names up also runs where nothing is built
        from pagedkv.core.files import read_bytes

        with self.reading(what, offset, n):
            return read_bytes(self._fd, n, offset)

    @contextlib.contextmanager
    def reading(self, what: str, offset: int, n: int) -> Iterator[None]:
        """Turns EOFError(position of the end) and OSError of a block that reads those bytes into ModelError."""
        try:
            yield
        except EOFError as error:
            found = min(max(error.args[0] - offset, 0), n)
            raise ModelError(
                f"{self.path}: {what}: {n} bytes at offset {offset}, found {found}; the file was cut short meanwhile"
            ) from None
        except OSError as error:
            raise ModelError(f"{self.path}: {what}: {error.strerror or error}") from None

    def check_unchanged(self) -> None:
        """Raise ModelError when, by its size and time, somebody wrote into the file since it was opened."""
        status = os.fstat(self._fd)
        if (status.st_size, status.st_mtime_ns) != (self.n_bytes, self._stamp):
            raise ModelError(
                f"{self.path}: changed while it was read: {self.n_bytes} bytes when it was opened, {status.st_size} now"
            )
