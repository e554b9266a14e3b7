"""Writer of good and of damaged GGUF files, from the format's description and nothing of the reader."""

import struct
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}
TYPE_IDS = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q8_0": (8, 32, 34)}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, item) -> bytes:
    """A value of `kind`; for ARRAY, item is (element kind, list of items)."""
    if kind == STRING:
        return string(item)
    if kind == ARRAY:
        element, items = item
        return struct.pack("<IQ", element, len(items)) + b"".join(value(element, x) for x in items)
    return struct.pack("<" + _CODES[kind], item)


def entry(key: str | bytes, kind: int, item) -> bytes:
    return string(key) + struct.pack("<I", kind) + value(kind, item)


def tensor_entry(name: str | bytes, dims: list[int], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def assemble(
    entries: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    n_entries: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if n_tensors is None else n_tensors,
        len(entries) if n_entries is None else n_entries,
    )
    raw = head + b"".join(entries) + b"".join(tensors)
    return raw + b"\0" * (-len(raw) % alignment) + data


def model(
    tensors: dict[str, tuple[tuple[int, ...], str]],
    entries: list[tuple[str, int, object]],
    fill: int = 0,
    alignment: int = 32,
) -> bytes:
    """A whole file: tensors as {name: (shape in numpy order, type name)}, their bytes all `fill`."""
    infos, data = [], b""
    for name, (shape, type_name) in tensors.items():
        kind, block, block_bytes = TYPE_IDS[type_name]
        infos.append(tensor_entry(name, list(reversed(shape)), kind, len(data)))
        n = 1
        for dim in shape:
            n *= dim
        raw = bytes([fill]) * (n // block * block_bytes)
        data += raw + b"\0" * (-len(raw) % alignment)
    return assemble([entry(*e) for e in entries], infos, data, alignment=alignment)


def write(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path
