from collections.abc import Callable
from typing import Any

from pagedkv.core._kernels import ThreadPool

WEIGHT_TYPES: tuple[str, ...]
PANEL_LAYOUT: dict[str, tuple[int, int, int]]

class PackedMatrix:
    @staticmethod
    def pack(
        pool: ThreadPool,
        type_name: str,
        source: Any,
        n_rows: int,
        n_cols: int,
        row_order: Any = None,
        release: Callable[[int, int], object] | None = None,
    ) -> PackedMatrix: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def type_name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def row(self, i: int) -> bytearray: ...
