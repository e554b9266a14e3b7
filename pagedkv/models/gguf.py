"""Reader of GGUF v2 and v3 model files: nothing is believed before it is checked against the file's size.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import itertools
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from pagedkv.models.errors import ModelError
from pagedkv.models.files import ModelFile

# ggml type id -> (name, weights per block, bytes per block)
TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8),
    40: ("NVFP4", 64, 36), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 20: ("IQ4_NL", 32, 18), 39: ("MXFP4", 32, 17),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
}  # fmt: skip

# metadata value type id -> (struct format, numpy dtype); 7 is bool, 8 string, 9 array
_SCALARS = {
    0: ("<B", "u1"), 1: ("<b", "i1"), 2: ("<H", "<u2"), 3: ("<h", "<i2"), 4: ("<I", "<u4"), 5: ("<i", "<i4"),
    6: ("<f", "<f4"), 10: ("<Q", "<u8"), 11: ("<q", "<i8"), 12: ("<d", "<f8"),
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9

_HEADER_BYTES = 24
_MIN_ENTRY_BYTES = 8 + 1 + 4 + 1  # key length, one byte of key, type, one byte of value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name length, one byte of name, n_dims, one dimension, type, offset
_MAX_DIMS = 4
_MAX_NAME_BYTES = 65535
_MAX_STRING_BYTES = 1 << 26
_MAX_STRINGS = 1 << 21
_MAX_NESTED_ARRAYS = 1 << 12
_MAX_NESTING = 4
_WINDOW = 1 << 20  # bytes of metadata read at once

_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: `shape` in numpy order (rows, columns), `offset` in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    n_bytes: int


class StringArray(Sequence[str]):
    """An array of strings kept as the file's own bytes and decoded when asked for: never larger than in the file.

    Indexing and iterating raise ModelError naming key and index where the bytes are not UTF-8.
    """

    __slots__ = ("_blob", "_ends", "_key")

    def __init__(self, key: str, blob: bytes, ends: "array[int]"):
        self._key, self._blob, self._ends = key, blob, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} strings")
        return self._decode(index, (self._ends[index - 1] if index else 0) + 8, self._ends[index])

    def __iter__(self) -> Iterator[str]:
        blob, start = self._blob, 8
        try:
            for end in self._ends:
                yield blob[start:end].decode()
                start = end + 8
        except UnicodeDecodeError:
            self._decode(self._ends.index(end), start, end)

    def __eq__(self, other) -> bool:
        return isinstance(other, Sequence) and not isinstance(other, str) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"StringArray({self._key}, {len(self)} strings)"

    def _decode(self, index: int, start: int, end: int) -> str:
        try:
            return self._blob[start:end].decode()
        except UnicodeDecodeError:
            raise ModelError(f"{self._key}[{index}]: {self._blob[start:end][:32]!r} is not UTF-8") from None


class GGUFFile:
    """A GGUF file, open for reading. Use as a context manager or call `close`.

    .path       Path
    .version    2 or 3
    .metadata   dict: int, float, bool, str, numpy array (numbers), StringArray or list (arrays of arrays)
    .tensors    dict[str, TensorInfo] in file order

    Opening reads the metadata and checks every count, length, type and range against the file's size. Metadata outlives
    the file. Raises ModelError, one line naming key, value and bound. What others do to the file: see ModelFile.
    """

    def __init__(self, path: str | os.PathLike):
        self._file = ModelFile(path)
        self.path, self._size = self._file.path, self._file.n_bytes
        self._window, self._base = b"", 0  # bytes of the file from _base on
        self._pos = 0
        self._n_nested = 0
        try:
            if self._size < _HEADER_BYTES:
                self._fail(f"{self._size} bytes long; a GGUF header alone has {_HEADER_BYTES}")
            self._read_header()
        except BaseException:
            self.close()
            raise
        finally:
            self._window = b""

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    @property
    def n_bytes(self) -> int:
        """Bytes of the file."""
        return self._size

    def data(self, name: str) -> bytes:
        """Bytes of tensor `name`, read. KeyError for an unknown name."""
        info = self.tensors[name]
        return self._file.read(f"tensor {name}", info.offset, info.n_bytes)

    def file(self, name: str) -> ModelFile:
        """The file that tensor `name` lies in, for reading a part of it."""
        return self._file

    def check_unchanged(self) -> None:
        """As ModelFile.check_unchanged."""
        self._file.check_unchanged()

    def _fail(self, text: str) -> NoReturn:
        raise ModelError(f"{self.path}: {text}")

    # Reading

    def _read_header(self) -> None:
        at = self._need("header", _HEADER_BYTES)
        magic, self.version, n_tensors, n_entries = struct.unpack_from("<4sIQQ", self._window, at)
        if magic != b"GGUF":
            self._fail(f"not a GGUF file: it starts with {magic!r}")
        if self.version & 0xFFFF == 0:
            self._fail("big-endian GGUF file; only little-endian files are supported")
        if self.version not in (2, 3):
            self._fail(f"GGUF version {self.version} is not supported; versions 2 and 3 are")
        self._check_count("metadata entries", n_entries, _MIN_ENTRY_BYTES)
        self.metadata: dict[str, Any] = {}
        for _ in range(n_entries):
            key = self._name("metadata key")
            if key in self.metadata:
                self._fail(f"metadata key {key!r} appears twice")
            self.metadata[key] = self._value(key, self._u32(key))
        self._check_count("tensors", n_tensors, _MIN_TENSOR_BYTES)
        raw = []
        seen = set()
        for _ in range(n_tensors):
            name = self._name("tensor name")
            if name in seen:
                self._fail(f"tensor {name!r} appears twice")
            seen.add(name)
            raw.append(self._tensor_entry(name))
        self._place_tensors(raw)

    def _need(self, what: str, n: int) -> int:
        """Index in the window of the next n bytes; advances past them."""
        pos = self._pos
        if n > self._size - pos:
            self._fail(f"{what}: {n} bytes at offset {pos} pass the end of the file at {self._size}")
        if pos + n > self._base + len(self._window):
            self._read_window(what, n)
        self._pos = pos + n
        return pos - self._base

    def _read_window(self, what: str, n: int) -> None:
        """Let the window begin at the position and hold at least n bytes, which the file must have."""
        self._base = self._pos
        self._window = b""  # the old one goes before the new one comes
        self._window = self._file.read(what, self._pos, min(max(n, _WINDOW), self._size - self._pos))

    def _check_count(self, what: str, count: int, min_bytes: int) -> None:
        if count > (self._size - self._pos) // min_bytes:
            left = self._size - self._pos
            self._fail(f"{what}: a count of {count} needs at least {min_bytes} bytes each, {left} are left in the file")

    def _u32(self, what: str) -> int:
        at = self._need(what, 4)
        return _u32(self._window, at)[0]

    def _u64(self, what: str) -> int:
        at = self._need(what, 8)
        return _u64(self._window, at)[0]

    def _text(self, what: str, limit: int) -> str:
        n = self._u64(what)
        if n > limit:
            self._fail(f"{what}: a length of {n} bytes, at most {limit} are allowed")
        start = self._need(what, n)
        try:
            return self._window[start : start + n].decode()
        except UnicodeDecodeError:
            self._fail(f"{what}: {self._window[start : start + min(n, 32)]!r} is not UTF-8")

    def _name(self, what: str) -> str:
        start = self._pos
        name = self._text(f"{what} at offset {start}", _MAX_NAME_BYTES)
        if not name:
            self._fail(f"{what} at offset {start} is empty")
        return name

    def _value(self, key: str, kind: int) -> Any:
        if kind in _SCALARS:
            code = _SCALARS[kind][0]
            at = self._need(key, struct.calcsize(code))
            return struct.unpack_from(code, self._window, at)[0]
        if kind == _STRING:
            return self._text(key, _MAX_STRING_BYTES)
        if kind == _BOOL:
            at = self._need(key, 1)
            value = self._window[at]
            if value > 1:
                self._fail(f"{key}: boolean {value} is neither 0 nor 1")
            return bool(value)
        if kind == _ARRAY:
            return self._array(key, 1)
        self._fail(f"{key}: unknown value type {kind}")

    def _array(self, key: str, depth: int) -> Any:
        kind, count = self._u32(key), self._u64(key)
        if kind in _SCALARS or kind == _BOOL:
            dtype = np.dtype(_SCALARS[kind][1] if kind != _BOOL else "u1")
            self._check_count(key, count, dtype.itemsize)
            start = self._need(key, count * dtype.itemsize)
            values = np.frombuffer(self._window, dtype, count, start).copy()
            if kind == _BOOL:
                if count and values.max() > 1:
                    self._fail(f"{key}: boolean {values.max()} is neither 0 nor 1")
                return values.astype(bool)
            return values
        if kind == _STRING:
            return self._strings(key, count)
        if kind == _ARRAY:
            self._check_count(key, count, 12)
            self._n_nested += count
            if depth >= _MAX_NESTING or self._n_nested > _MAX_NESTED_ARRAYS:
                self._fail(f"{key}: arrays nested over {_MAX_NESTING} deep or over {_MAX_NESTED_ARRAYS} of them")
            return [self._array(key, depth + 1) for _ in range(count)]
        self._fail(f"{key}: unknown array element type {kind}")

    def _strings(self, key: str, count: int) -> StringArray:
        self._check_count(key, count, 8)
        if count > _MAX_STRINGS:
            self._fail(f"{key}: {count} strings, at most {_MAX_STRINGS} are allowed")
        start = pos = self._pos
        window, base = self._window, self._base
        window_end = base + len(window)
        ends = array("q")
        append, last = ends.append, self._size - 8
        for index in range(count):
            if pos > last:
                self._fail(f"{key}[{index}]: length at offset {pos} passes the end of the file at {self._size}")
            if pos + 8 > window_end:
                self._pos = pos
                self._read_window(f"{key}[{index}]", 8)
                window, base = self._window, self._base
                window_end = base + len(window)
            n = _u64(window, pos - base)[0]
            pos += 8 + n
            if pos > self._size:
                self._fail(f"{key}[{index}]: {n} bytes at offset {pos - n} pass the end of the file at {self._size}")
            append(pos - start)
        self._pos = pos
        return StringArray(key, self._file.read(key, start, pos - start), ends)

    # Tensors

    def _tensor_entry(self, name: str) -> tuple[str, tuple[int, ...], str, int, int]:
        """(name, shape, type name, offset in the data section, bytes) of the tensor entry at the current position."""
        n_dims = self._u32(name)
        if not 1 <= n_dims <= _MAX_DIMS:
            self._fail(f"tensor {name}: {n_dims} dimensions, must be 1 to {_MAX_DIMS}")
        dims = tuple(self._u64(name) for _ in range(n_dims))
        kind = self._u32(name)
        offset = self._u64(name)
        if kind not in TENSOR_TYPES:
            self._fail(f"tensor {name}: unknown type {kind}")
        type_name, block, block_bytes = TENSOR_TYPES[kind]
        n_elements = 1
        for dim in dims:
            n_elements *= dim
        if n_elements == 0:
            self._fail(f"tensor {name}: a dimension of {list(dims)} is zero")
        if dims[0] % block:
            self._fail(f"tensor {name}: row length {dims[0]} is not a multiple of {type_name}'s block of {block}")
        n_bytes = n_elements // block * block_bytes
        if n_bytes > self._size:
            self._fail(f"tensor {name}: {list(dims)} of {type_name} are {n_bytes} bytes, the file has {self._size}")
        return name, dims[::-1], type_name, offset, n_bytes

    def _place_tensors(self, raw: list[tuple[str, tuple[int, ...], str, int, int]]) -> None:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 65536 or alignment & (alignment - 1):
            self._fail(f"general.alignment: {alignment!r} is not a power of two in [8, 65536]")
        start = -(-self._pos // alignment) * alignment
        room = max(self._size - start, 0)
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, type_name, offset, n_bytes in raw:
            if offset % alignment:
                self._fail(f"tensor {name}: offset {offset} is not a multiple of the alignment {alignment}")
            if offset > room - n_bytes:
                self._fail(
                    f"tensor {name}: {n_bytes} bytes at {start + offset} pass the end of the file at {self._size}"
                )
            self.tensors[name] = TensorInfo(name, shape, type_name, start + offset, n_bytes)
        ordered = sorted(self.tensors.values(), key=lambda info: info.offset)
        for before, after in itertools.pairwise(ordered):
            if before.offset + before.n_bytes > after.offset:
                self._fail(
                    f"tensor {after.name} at offset {after.offset} overlaps {before.name}, "
                    f"which ends at {before.offset + before.n_bytes}"
                )
