"""Files of a hub's repository: what the hub says of them, and the record of what was pulled, to check it later."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pagedkv.models.errors import ModelError
from pagedkv.models.safetensors import read_json

_DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_COMMIT = re.compile(r"[\w.-]{1,200}")
_CHUNK = 1 << 18
_MAX_NAME = 1000


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository at one commit; `digest` is its SHA-256, or the SHA-1 that git gives small ones."""

    name: str
    n_bytes: int
    digest: str
    commit: str

    @classmethod
    def checked(cls, name: Any, n_bytes: Any, digest: Any, commit: Any) -> HubFile | None:
        """None for what a hub, or a file on disk, must not make us believe."""
        sound = (
            is_inside(name)
            and type(n_bytes) is int
            and n_bytes >= 0
            and isinstance(digest, str)
            and _DIGEST.fullmatch(digest)
            and isinstance(commit, str)
            and _COMMIT.fullmatch(commit)
        )
        return cls(name, n_bytes, digest, commit) if sound else None

    def is_whole(self, path: Path, every_byte: bool = True) -> bool:
        """Whether `path` has the size and, if asked to look at every byte, the digest. OSError."""
        if not path.is_file() or path.stat().st_size != self.n_bytes:
            return False
        if not every_byte:
            return True
        digest = hashlib.sha256() if len(self.digest) == 64 else hashlib.sha1(b"blob %d\0" % self.n_bytes)
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        return digest.hexdigest() == self.digest


class Record:
    """What was pulled into a directory: path in it -> HubFile, kept in `pulled.json`.

    What the file has that cannot be is left out, so that at worst a model counts as unrecorded.
    """

    def __init__(self, directory: Path):
        self.directory, self._path = directory, directory / "pulled.json"
        self.files: dict[str, HubFile] = {}
        with contextlib.suppress(ModelError):
            for place, entry in read_json(self._path).items():
                if is_inside(place) and isinstance(entry, dict):
                    found = HubFile.checked(*(entry.get(key) for key in ("name", "n_bytes", "digest", "commit")))
                    if found is not None:
                        self.files[place] = found

    def under(self, places: Iterable[Path]) -> dict[Path, HubFile]:
        """The recorded ones of some files, and all that are recorded in those of the places that are directories."""
        wanted = [str(place.relative_to(self.directory)) for place in places]
        return {
            self.directory / place: file
            for place, file in self.files.items()
            if place in wanted or str(PurePosixPath(place).parent) in wanted
        }

    def add(self, files: dict[Path, HubFile]) -> None:
        """Keep what belongs at some paths, before it is put there. OSError."""
        self.files |= {str(path.relative_to(self.directory)): file for path, file in files.items()}
        text = json.dumps({place: asdict(file) for place, file in self.files.items()}, indent=1)
        replace_text(self._path, text)


class Bounded:
    """A file to write a download into, which refuses more bytes than were announced."""

    def __init__(self, file: Any, n_bytes: int, refuse: Callable[[], ModelError]):
        self._file, self._n_bytes, self._refuse = file, n_bytes, refuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        """As a file's; raises what `refuse` gives where the file would become too long."""
        if self._file.tell() + len(data) > self._n_bytes:
            raise self._refuse()
        return self._file.write(data)


def is_inside(name: Any) -> bool:
    """Whether a name can be a path of a repository: relative, without `..`, of printable characters."""
    if not isinstance(name, str) or not name.isprintable() or "\\" in name or not 0 < len(name) <= _MAX_NAME:
        return False
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts


def replace_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all. OSError."""
    scratch = path.with_suffix(".new")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def line_of(error: BaseException) -> str:
    """What an error of another library says, as one short line without control characters."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return "".join(char if char.isprintable() else "?" for char in text)[:300]
