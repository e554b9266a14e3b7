from typing import Any

from pagedkv.core._kernels import ThreadPool
from pagedkv.core.memory import WeightMemory

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
        memory: WeightMemory | None = None,
    ) -> PackedMatrix: ...
    @staticmethod
    def read(
        pool: ThreadPool,
        type_name: str,
        fd: int,
        offset: int,
        n_rows: int,
        n_cols: int,
        row_order: Any = None,
        memory: WeightMemory | None = None,
    ) -> PackedMatrix: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def type_name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def row(self, i: int) -> bytearray: ...
