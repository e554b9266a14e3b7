"""Models split over several GGUF files, as llama.cpp's gguf-split writes them: NAME-00001-of-00003.gguf and so on."""

import re
from pathlib import Path

from pagedkv.models.errors import ModelError
from pagedkv.models.files import ModelFile
from pagedkv.models.gguf import GGUFFile, TensorInfo
from pagedkv.models.metadata import Metadata

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MAX_PARTS = 1024


class GGUFParts:
    """All files of a split model as one: the metadata of the first, the tensors of all.

    The same attributes and methods as GGUFFile. Raises ModelError naming the part and what is wrong with the set.
    """

    def __init__(self, first: GGUFFile, n_parts: int):
        """Takes `first` over; opens the other n_parts - 1."""
        self.path, self.version, self.metadata = first.path, first.version, first.metadata
        self.tensors: dict[str, TensorInfo] = {}
        self._parts = [first]
        self._part_of: dict[str, GGUFFile] = {}
        try:
            for number, path in enumerate(_part_paths(first.path, n_parts)):
                self._add(number, GGUFFile(path) if number else first, n_parts)
            wanted = Metadata(self.metadata).integer("split.tensors.count", 0, 1 << 31, default=len(self.tensors))
            if wanted != len(self.tensors):
                raise ModelError(f"split.tensors.count: {wanted}, the {n_parts} parts hold {len(self.tensors)} tensors")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "GGUFParts":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Close all parts. Idempotent."""
        for part in self._parts:
            part.close()

    def data(self, name: str) -> bytes:
        """As GGUFFile.data."""
        return self._part_of[name].data(name)

    def file(self, name: str) -> ModelFile:
        """As GGUFFile.file."""
        return self._part_of[name].file(name)

    def check_unchanged(self) -> None:
        """As ModelFile.check_unchanged, of every part."""
        for part in self._parts:
            part.check_unchanged()

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return sum(part.n_bytes for part in self._parts)

    def _add(self, number: int, part: GGUFFile, n_parts: int) -> None:
        if part not in self._parts:
            self._parts.append(part)
        read = Metadata(part.metadata)
        count, found = read.integer("split.count", 1, 65535), read.integer("split.no", 0, 65535)
        if count != n_parts or found != number:
            raise ModelError(f"{part.path}: part {found} of {count}, wanted part {number} of {n_parts}")
        for name, tensor in part.tensors.items():
            if name in self.tensors:
                raise ModelError(f"{part.path}: tensor {name} is in two parts")
            self.tensors[name] = tensor
            self._part_of[name] = part


GGUF = GGUFFile | GGUFParts


def open_gguf(path: Path) -> GGUF:
    """A GGUF file; with all its other parts when it is the first one of a split model. Raises ModelError."""
    file = GGUFFile(path)
    try:
        n_parts = Metadata(file.metadata).integer("split.count", 0, 65535, default=1)
    except BaseException:
        file.close()
        raise
    return file if n_parts <= 1 else GGUFParts(file, n_parts)


def part_names(name: str) -> list[str] | None:
    """Names of all parts of the split model of which a file of this name is one; None where the name is no part's."""
    match = _NAME.fullmatch(name)
    if match is None or not 1 <= int(match[3]) <= _MAX_PARTS:
        return None
    return [f"{match[1]}-{i + 1:05}-of-{match[3]}.gguf" for i in range(int(match[3]))]


def _part_paths(first: Path, n_parts: int) -> list[Path]:
    match = _NAME.fullmatch(first.name)
    if n_parts > _MAX_PARTS:
        raise ModelError(f"{first}: split.count: {n_parts}, at most {_MAX_PARTS} parts are supported")
    if match is None or int(match[2]) != 1 or int(match[3]) != n_parts:
        raise ModelError(
            f"{first}: one of {n_parts} parts of a model; give the first one, named NAME-00001-of-{n_parts:05}.gguf"
        )
    return [first.with_name(f"{match[1]}-{i + 1:05}-of-{n_parts:05}.gguf") for i in range(n_parts)]
