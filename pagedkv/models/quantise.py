"""Float weights as float32 and as Q8_0."""

from collections.abc import Callable

import numpy as np

FLOATS = ("F32", "F16", "BF16")
_CHUNK = 1 << 22  # values converted at a time


def to_float32(data: bytes | memoryview, type_name: str) -> np.ndarray:
    """Values of F32, F16 or BF16 bytes as a new float32 array; exact."""
    if type_name == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, "<f4" if type_name == "F32" else "<f2").astype(np.float32)


def to_q8_0(
    read: Callable[[int, int], bytes | memoryview], n_bytes: int, type_name: str, n_cols: int
) -> memoryview:
    """Rows of n_cols values, a multiple of 32, in GGUF's Q8_0: per 32 a half-precision scale amax/127 and 32 int8.

    read: called as read(start, stop) for one piece after the other of the n_bytes bytes in `type_name`'s layout.
    Values that a scale of half precision cannot hold come out as infinity or NaN. Source: ggml's block_q8_0.
    """
    size = 4 if type_name == "F32" else 2
    n = n_bytes // size
    out = np.empty((n // 32, 34), np.uint8)
    step = max(_CHUNK // n_cols, 1) * n_cols
    for start in range(0, n, step):
        stop = min(start + step, n)
        x = to_float32(read(start * size, stop * size), type_name).reshape(-1, 32)
        scale = np.abs(x).max(1, keepdims=True) / np.float32(127)
        q = np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale > 0))
        block = out[start // 32 : stop // 32]
        block[:, :2] = scale.astype("<f2").view(np.uint8)
        block[:, 2:] = q.astype(np.int8).view(np.uint8)
    return memoryview(out.data).cast("B")
