from collections.abc import Sequence
from typing import Any

from pagedkv.core.sampling_state import SamplingState

def philox4x32(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]: ...

class Sampler:
    vocab_size: int
    n_threads: int
    def __init__(self, vocab_size: int, pool: Any = None) -> None: ...
    def sample(self, logits: Any, states: Sequence[SamplingState], rows: Sequence[int]) -> None: ...
    def score(
        self, logits: Any, rows: Sequence[int], targets: Sequence[int], n_logprobs: int
    ) -> list[tuple[float, int, list[tuple[int, float]]] | None]: ...
