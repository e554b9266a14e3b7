from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.core._kernels import ThreadPool
from pagedkv.core.kvcache import KVSequence, PagedKVCache
from pagedkv.core.layer import Layer
from pagedkv.core.matmul import PackedMatrix

ACTIVATIONS: tuple[str, ...]
EXPERT_SHARES: tuple[str, ...]
FFN_ACTIVATIONS: tuple[str, ...]
OPERATIONS: tuple[str, ...]

class ForwardModel:
    pool: ThreadPool
    vocab_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    profile: bool
    def __init__(
        self,
        *,
        layers: Iterable[Layer],
        embedding: PackedMatrix,
        head: PackedMatrix,
        head_norm: ArrayLike,
        inv_freq: ArrayLike,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        rms_eps: float,
        pool: ThreadPool,
        activations: str = "int8",
        rope_factors: ArrayLike | None = None,
        ffn_activation: str = "silu",
        attention_scale: float | None = None,
        attention_softcap: float = 0.0,
        logit_softcap: float = 0.0,
        embedding_scale: float = 1.0,
        residual_scale: float = 1.0,
        experts_used: int = 0,
        expert_shares: str = "chosen",
    ) -> None: ...
    def close(self) -> None: ...
    @property
    def vocab_padded(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def profile_seconds(self) -> dict[str, float]: ...
    def run(
        self,
        kv: PagedKVCache,
        seqs: Iterable[KVSequence],
        token_ids: ArrayLike,
        q_lens: ArrayLike,
        logit_rows: ArrayLike,
        logits: NDArray[np.float32] | None,
        hidden: NDArray[np.float32] | None = None,
    ) -> None: ...
