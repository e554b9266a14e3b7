"""Language models on CPUs from a paged KV cache. Public names load on first use, so importing the package is cheap."""

from importlib import import_module
from pathlib import Path

# name -> module that defines it
EXPORTS = {
    "Arena": "pagedkv.core.arena",
    "BadInput": "pagedkv.core.errors",
    "NotFound": "pagedkv.core.errors",
    "PagedKVError": "pagedkv.core.errors",
    "PoolExhausted": "pagedkv.core.errors",
    "PrefixIndex": "pagedkv.core.prefix",
    "Sequence": "pagedkv.core.sequence",
    "SequenceFull": "pagedkv.core.errors",
    "Tampered": "pagedkv.core.errors",
    "Verdict": "pagedkv.core.errors",
    "Violation": "pagedkv.core.check",
}

__all__ = [*EXPORTS, "get_include"]


def get_include() -> str:
    """Directory to put on a C compiler's include path for `#include <pagedkv/pagedkv.h>`."""
    return str(Path(__file__).parent / "include")


def __getattr__(name: str):
    module = EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'pagedkv' has no attribute '{name}'")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *EXPORTS])
