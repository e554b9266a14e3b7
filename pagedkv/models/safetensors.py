"""Weights of a Hugging Face directory: its safetensors files, mapped, under GGUF's tensor names."""

import contextlib
import json
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagedkv.models.errors import ModelError
from pagedkv.models.gguf import TensorInfo, drop_pages

_TYPES = {"F32": ("F32", 4), "F16": ("F16", 2), "BF16": ("BF16", 2)}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_JSON_BYTES = 1 << 26


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of up to 64 MiB. Raises ModelError naming the file."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(f"{path}: {path.stat().st_size} bytes, at most {_MAX_JSON_BYTES} are allowed")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON {type(value).__name__}, must be an object")
    return value


class SafetensorsFiles:
    """The tensors of `model.safetensors`, or of the shards its index lists. Use as a context manager or call `close`.

    .tensors   dict[str, TensorInfo] by the names that `rename` gives; tensors it gives None are left out

    The `safetensors` library checks each file before anything of it is believed; tensor data is not copied. Raises
    ModelError naming file, tensor and what is wrong, also where the library is not installed.
    """

    def __init__(self, directory: Path, rename: Callable[[str], str | None]):
        self.tensors: dict[str, TensorInfo] = {}
        self._maps: dict[str, mmap.mmap] = {}
        self._file_of: dict[str, str] = {}
        self.n_bytes = 0
        try:
            for file in _shards(directory):
                self._add(directory / file, rename)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "SafetensorsFiles":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files. Idempotent. Views from `data` stay valid: a mapping goes with the last of them."""
        for mapping in self._maps.values():
            with contextlib.suppress(BufferError):
                mapping.close()

    def data(self, name: str) -> memoryview:
        """Bytes of tensor `name`, a read-only view on the mapping: nothing is copied. KeyError for an unknown name."""
        info = self.tensors[name]
        return memoryview(self._maps[self._file_of[name]])[info.offset : info.offset + info.n_bytes]

    def drop(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """As GGUFFile.drop."""
        info = self.tensors[name]
        end = info.offset + (info.n_bytes if stop is None else stop)
        drop_pages(self._maps[self._file_of[name]], info.offset + start, end)

    def _add(self, path: Path, rename: Callable[[str], str | None]) -> None:
        check_with_library(path)
        with open(path, "rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._maps[path.name] = mapping
        self.n_bytes += len(mapping)
        start = 8 + int.from_bytes(mapping[:8], "little")
        for original, entry in json.loads(mapping[8:start]).items():
            name = None if original == "__metadata__" else rename(original)
            if name is None:
                continue
            if name in self.tensors:
                raise ModelError(f"{path}: tensor {original} appears twice")
            if entry["dtype"] not in _TYPES:
                raise ModelError(f"{path}: tensor {original}: type {entry['dtype']}; supported: {', '.join(_TYPES)}")
            first, last = entry["data_offsets"]
            if not entry["shape"] or last == first:
                raise ModelError(f"{path}: tensor {original}: shape {entry['shape']} holds no vector or matrix")
            kind = _TYPES[entry["dtype"]][0]
            self.tensors[name] = TensorInfo(name, tuple(entry["shape"]), kind, start + first, last - first)
            self._file_of[name] = path.name


def check_with_library(path: Path) -> None:
    """Raise ModelError unless `path` is a sound safetensors file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ModelError(f"{path}: reading it needs the safetensors library: pip install safetensors") from None
    try:
        with safe_open(path, framework="numpy") as file:
            file.keys()
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a sound safetensors file: {error}") from None


def _shards(directory: Path) -> list[str]:
    """File names with the weights, in order."""
    if not (directory / INDEX).exists():
        if not (directory / SINGLE).exists():
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
