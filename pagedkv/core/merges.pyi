import numpy as np
from numpy.typing import ArrayLike

PART: int
WHOLE: int
MATCHED: int
MAX_CHARACTERS: int

class ScoredMerges:
    def __init__(
        self, text: bytes, ends: np.ndarray, ranks: ArrayLike, roles: ArrayLike, unknown: int = -1
    ) -> None: ...
    def encode(self, text: str, prefix: bool) -> list[int]: ...
