"""Arrays between guard pages: reading or writing one element too far ends the process with SIGSEGV."""

import ctypes
import mmap

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Memory:
    """Owns guarded arrays until the `with` block ends; they must not be used after it."""

    def __init__(self):
        self._maps = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for address, size in self._maps:
            _libc.munmap(address, size)

    def zeros(self, shape, dtype, align=None, flush="end"):
        """An array whose last byte (flush="start": whose first byte) touches a guard page, as far as `align` allows.

        The rest of the OS pages it lies in holds 0xff bytes, NaN in every float format.
        """
        dtype = np.dtype(dtype)
        align = align or dtype.itemsize
        n_bytes = int(np.prod(shape)) * dtype.itemsize
        body = -(-max(n_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        size = body + 2 * mmap.PAGESIZE
        base = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert base not in (None, ctypes.c_void_p(-1).value)
        self._maps.append((base, size))
        first = base + mmap.PAGESIZE
        ctypes.memset(first, 0xFF, body)
        for guard in (base, first + body):
            assert _libc.mprotect(guard, mmap.PAGESIZE, 0) == 0
        start = first if flush == "start" else first + (body - n_bytes) // align * align
        array = np.frombuffer((ctypes.c_uint8 * n_bytes).from_address(start), dtype=dtype).reshape(shape)
        array[...] = 0
        return array

    def copy(self, values, align=None, flush="end"):
        """A guarded copy of `values`."""
        array = self.zeros(values.shape, values.dtype, align, flush)
        array[...] = values
        return array


def address(array):
    """What a kernel takes for a pointer; 0 for None."""
    return 0 if array is None else array.ctypes.data
