"""The compiled part. Importing it where nothing was compiled is one ImportError that says what to do."""

from importlib.machinery import PathFinder as _PathFinder
from os import listdir as _listdir


def _require_build(directory: str) -> None:
    """ImportError, one line, when `directory`, of this package, lacks modules that this Python can load: all of them,
    or those whose source came after the last build."""
    sources = [name.removesuffix(".pyx") for name in _listdir(directory) if name.endswith(".pyx")]
    if all(_PathFinder.find_spec(name, [directory]) for name in sources or ["_kernels"]):
        return
    if sources:
        root = directory.removesuffix("/pagedkv/core")
        raise ImportError(
            f"{root} holds the source of pagedkv, not built for this Python: to use an installed pagedkv, start in "
            "another directory or with `python -P`; to use this source, run `python setup.py build_ext --inplace` there"
        )
    raise ImportError(f"{directory} has no modules built for this Python: install pagedkv again")


_require_build(__path__[0])
