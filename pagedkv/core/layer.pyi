from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.core.matmul import PackedMatrix

class Layer:
    q: PackedMatrix
    k: PackedMatrix
    v: PackedMatrix
    o: PackedMatrix
    gate: PackedMatrix | None
    up: PackedMatrix | None
    down: PackedMatrix | None
    router: PackedMatrix | None
    experts: tuple[tuple[PackedMatrix, PackedMatrix, PackedMatrix], ...]
    attn_norm: NDArray[np.float32] | None
    ffn_norm: NDArray[np.float32] | None
    post_attn_norm: NDArray[np.float32] | None
    post_ffn_norm: NDArray[np.float32] | None
    q_bias: NDArray[np.float32] | None
    k_bias: NDArray[np.float32] | None
    v_bias: NDArray[np.float32] | None
    q_norm: NDArray[np.float32] | None
    k_norm: NDArray[np.float32] | None
    rope: int | None
    window: int
    def __init__(
        self,
        *,
        q: PackedMatrix,
        k: PackedMatrix,
        v: PackedMatrix,
        o: PackedMatrix,
        gate: PackedMatrix | None = None,
        up: PackedMatrix | None = None,
        down: PackedMatrix | None = None,
        router: PackedMatrix | None = None,
        experts: Iterable[tuple[PackedMatrix, ...]] = (),
        attn_norm: ArrayLike | None = None,
        ffn_norm: ArrayLike | None = None,
        post_attn_norm: ArrayLike | None = None,
        post_ffn_norm: ArrayLike | None = None,
        q_bias: ArrayLike | None = None,
        k_bias: ArrayLike | None = None,
        v_bias: ArrayLike | None = None,
        q_norm: ArrayLike | None = None,
        k_norm: ArrayLike | None = None,
        rope: int | None = 0,
        window: int = 0,
    ) -> None: ...
    @property
    def matrices(self) -> list[PackedMatrix]: ...
