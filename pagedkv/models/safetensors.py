"""Weights of a Hugging Face directory: its safetensors files, under GGUF's tensor names."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagedkv.models.errors import ModelError
from pagedkv.models.files import ModelFile, read_small
from pagedkv.models.gguf import TensorInfo

_TYPES = {"F32": ("F32", 4), "F16": ("F16", 2), "BF16": ("BF16", 2)}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_COMPARED_BYTES = 1 << 20  # at a time
_MAX_HEADER_BYTES = 100_000_000  # the library refuses larger ones


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of up to 64 MiB. Raises ModelError naming the file."""
    raw = read_small(path)
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON {type(value).__name__}, must be an object")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """As `read_json`; an empty object where nothing is there under that name."""
    return read_json(path) if os.path.lexists(path) else {}


class SafetensorsFiles:
    """The tensors of `model.safetensors`, or of the shards its index lists. Use as a context manager or call `close`.

    .tensors   dict[str, TensorInfo] by the names that `names` gives, each with its own name; tensors it gives None are
               left out

    The `safetensors` library checks each header before anything of it is believed. Raises ModelError naming file,
    tensor and what is wrong, also where the library is not installed. What others do to the files: see ModelFile.
    """

    def __init__(self, directory: Path, names: Callable[[str], str | None]):
        self.tensors: dict[str, TensorInfo] = {}
        self._files: list[ModelFile] = []
        self._file_of: dict[str, ModelFile] = {}
        self.n_bytes = 0
        try:
            for file in _shards(directory):
                self._add(directory / file, names)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "SafetensorsFiles":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Idempotent."""
        for file in self._files:
            file.close()

    def data(self, name: str) -> bytes:
        """Bytes of tensor `name`, read. KeyError for an unknown name."""
        info = self.tensors[name]
        return self._file_of[name].read(f"tensor {info.name}", info.offset, info.n_bytes)

    def equal(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same bytes in the same shape and type."""
        a, b = self.tensors[one], self.tensors[other]
        if (a.shape, a.type_name) != (b.shape, b.type_name):
            return False
        for start in range(0, a.n_bytes, _COMPARED_BYTES):
            n = min(_COMPARED_BYTES, a.n_bytes - start)
            parts = [
                self._file_of[name].read(f"tensor {info.name}", info.offset + start, n)
                for name, info in ((one, a), (other, b))
            ]
            if parts[0] != parts[1]:
                return False
        return True

    def drop(self, name: str) -> None:
        """Leave a tensor out."""
        del self.tensors[name], self._file_of[name]

    def rename(self, name: str, to: str) -> None:
        """Call a tensor by another name."""
        self.tensors[to], self._file_of[to] = self.tensors.pop(name), self._file_of.pop(name)

    def file(self, name: str) -> ModelFile:
        """As GGUFFile.file."""
        return self._file_of[name]

    def check_unchanged(self) -> None:
        """As ModelFile.check_unchanged, of every file."""
        for file in self._files:
            file.check_unchanged()

    def _add(self, path: Path, names: Callable[[str], str | None]) -> None:
        file = ModelFile(path)
        self._files.append(file)
        self.n_bytes += file.n_bytes
        header = _read_header(file)
        start = 8 + len(header)
        for original, entry in _entries(header).items():
            name = None if original == "__metadata__" else names(original)
            if name is None:
                continue
            if name in self.tensors:
                raise ModelError(f"{path}: tensor {original} appears twice")
            if entry["dtype"] not in _TYPES:
                raise ModelError(f"{path}: tensor {original}: {_foreign(entry['dtype'])}")
            first, last = entry["data_offsets"]
            if not entry["shape"] or last == first:
                raise ModelError(f"{path}: tensor {original}: shape {entry['shape']} holds no vector or matrix")
            kind = _TYPES[entry["dtype"]][0]
            self.tensors[name] = TensorInfo(original, tuple(entry["shape"]), kind, start + first, last - first)
            self._file_of[name] = file


def _read_header(file: ModelFile) -> bytes:
    """The JSON text of a safetensors file's header, found sound by the library. Raises ModelError."""
    prefix = file.read("header", 0, min(8, file.n_bytes))
    # a length that cannot be is left for the library to refuse
    n = min(int.from_bytes(prefix, "little"), _MAX_HEADER_BYTES, file.n_bytes - len(prefix))
    header = file.read("header", len(prefix), n)
    try:
        check_with_library(file.path, prefix + header, file.n_bytes)
    except ModelError:
        # the library does not say which tensor it is, and knows types that are of no use here
        for name, entry in _entries(header).items():
            kind = entry.get("dtype") if isinstance(entry, dict) else None
            if name != "__metadata__" and isinstance(kind, str) and kind not in _TYPES:
                raise ModelError(f"{file.path}: tensor {name}: {_foreign(kind)}") from None
        raise
    return header


def _entries(header: bytes) -> dict[str, Any]:
    """The table of a header; empty for one that is none, which the library refuses."""
    try:
        table = json.loads(header)
    except (ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def _foreign(kind: str) -> str:
    return f"type {kind}; supported: {', '.join(_TYPES)}"


def check_with_library(path: Path, start: bytes, n_bytes: int) -> None:
    """Raise ModelError unless `start` is the prefix and header of a sound safetensors file of n_bytes bytes."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ModelError(f"{path}: reading it needs the safetensors library: pip install safetensors") from None
    try:
        # the library maps what it opens, so it gets a file nobody else can cut: the header, and a hole for the weights
        with open(os.memfd_create("safetensors header"), "wb") as copy:
            copy.write(start)
            copy.flush()
            os.ftruncate(copy.fileno(), n_bytes)
            with safe_open(f"/proc/self/fd/{copy.fileno()}", framework="numpy") as file:
                file.keys()
    except (SafetensorError, OSError, MemoryError) as error:
        raise ModelError(f"{path}: not a sound safetensors file: {error}") from None


def _shards(directory: Path) -> list[str]:
    """File names with the weights, in order."""
    if not os.path.lexists(directory / INDEX):
        if not os.path.lexists(directory / SINGLE):
            raise ModelError(f"{directory}: neither {SINGLE} nor {INDEX} is there")
        return [SINGLE]
    table = read_json(directory / INDEX).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise ModelError(f"{directory / INDEX}: weight_map is not a table of file names")
    names = sorted(set(table.values()))
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise ModelError(f"{directory / INDEX}: {name!r} is not a file of the directory")
    return names
