"""The pinned hashes: kernel -> sha256 of its outputs over the cases of kernel_hashes.c, on every ISA and machine."""

import json
from pathlib import Path

PATH = Path(__file__).with_name("golden_hashes.json")


def load():
    return json.loads(PATH.read_text())


def differences(hashes):
    """Lines that name every kernel of {isa: {kernel: sha256}} that is not the pinned one."""
    pinned = load()
    return [
        f"{isa} {kernel}: {found.get(kernel, 'not run')}, pinned {pinned.get(kernel, 'nowhere')}"
        for isa, found in hashes.items()
        for kernel in sorted(pinned.keys() | found.keys())
        if found.get(kernel) != pinned.get(kernel)
    ]
