"""The C API as a foreign caller sees it: the capsule's function table through ctypes, return values as they are."""

import ctypes
import re
from pathlib import Path

import pagedkv
from pagedkv.core import capi
from pagedkv.core._testing import layout

HEADER = Path(pagedkv.get_include(), "pagedkv", "pagedkv.h").read_text()
LAYOUT = {name: (offset, size) for name, offset, size in layout()}
TYPES = {"int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64, "uint32_t": ctypes.c_uint32}


def functions():
    """(name, return type, argument types) of every member of pkv_api, in order, read from the header."""
    body = re.search(r"typedef struct pkv_api \{(.*?)\} pkv_api;", HEADER, re.S).group(1)
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
    found = re.findall(r"(int64_t|uint8_t \*)\s*\(\*(\w+)\)\((.*?)\);", body, re.S)
    return [(name, result.strip(), [" ".join(a.split()) for a in args.split(",")]) for result, name, args in found]


def ctype(declaration):
    return ctypes.c_void_p if "*" in declaration else TYPES[declaration.split()[0]]


class RawApi:
    """Each function of pkv_api as a method; pointers are ints, NULL is None or 0."""

    def __init__(self):
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype = ctypes.c_void_p
        get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        base = get_pointer(capi._C_API, b"pagedkv.core.capi._C_API")
        self.abi_version, self.struct_size = (ctypes.c_int64 * 2).from_address(base)
        pointers = (ctypes.c_void_p * ((self.struct_size - 16) // 8)).from_address(base + 16)
        self.n_functions = len(pointers)
        for (name, result, args), pointer in zip(functions(), pointers, strict=True):
            prototype = ctypes.CFUNCTYPE(ctype(result), *[ctype(a) for a in args])
            setattr(self, name, prototype(pointer))

    def make(self, function, *args):
        """Call a function with an out-pointer first; (status, pointer or 0)."""
        out = ctypes.c_void_p(0xDEAD)
        status = function(ctypes.addressof(out), *args)
        return status, out.value or 0


def field(pointer, name, ctype_=ctypes.c_int64):
    """A struct field as an assignable ctypes object, e.g. field(arena, "pkv_arena.n_free").value."""
    return ctype_.from_address(pointer + LAYOUT[name][0])
