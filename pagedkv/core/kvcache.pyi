from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.core._kernels import ThreadPool
from pagedkv.core.arena import Arena
from pagedkv.core.sequence import Sequence

FORMATS: tuple[str, ...]
PAGE_TOKENS: tuple[int, ...]

def tile_bytes(format: str, head_dim: int, page_tokens: int) -> int: ...

class PagedKVCache(Arena):
    n_layers: int
    pool: ThreadPool
    def __init__(
        self,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        n_pages: int,
        format: str = "f16",
        page_tokens: int = 16,
        max_pages: int | None = None,
        threads: int | ThreadPool | None = None,
        growth_pages: int | None = None,
        guard: bool = False,
    ) -> None: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def page_tokens(self) -> int: ...
    @property
    def format(self) -> str: ...
    def sequence(self, seq_id: int = 0, max_pages: int | None = None) -> KVSequence: ...  # type: ignore[override]
    def attend(
        self,
        layer: int,
        q: ArrayLike,
        seqs: Iterable[KVSequence],
        q_lens: Iterable[int],
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> NDArray[np.float32]: ...

class KVSequence(Sequence):
    def __init__(self, arena: PagedKVCache, seq_id: int = 0, max_pages: int = 64) -> None: ...
    def __len__(self) -> int: ...
    def extend(self, n: int) -> int: ...
    def truncate(self, n: int) -> None: ...
    def share_prefix(self, pages: Iterable[int], n_tokens: int) -> None: ...
    def write_kv(self, layer: int, start: int, k: ArrayLike, v: ArrayLike) -> None: ...
    def gather(self, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...
