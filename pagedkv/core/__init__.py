"""The compiled part. Importing it where nothing was compiled is one ImportError that says what to do."""

from importlib.machinery import PathFinder as _PathFinder
from os.path import exists as _exists


def _require_build(directory: str) -> None:
    """ImportError, one line, when `directory`, of this package, has no module that this Python can load."""
    if _PathFinder.find_spec("_kernels", [directory]):
        return
    if _exists(f"{directory}/_kernels.pyx"):
        root = directory.removesuffix("/pagedkv/core")
        raise ImportError(
            f"{root} holds the source of pagedkv, not built for this Python: to use an installed pagedkv, start in "
            "another directory or with `python -P`; to use this source, run `python setup.py build_ext --inplace` there"
        )
    raise ImportError(f"{directory} has no modules built for this Python: install pagedkv again")


_require_build(__path__[0])
