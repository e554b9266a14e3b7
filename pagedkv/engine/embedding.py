"""One vector for a prompt: the mean of its last hidden states, computed in chunks beside everybody else's tokens."""

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from .outputs import EmbeddingOutput, EmbeddingRequestOutput
from .params import SamplingParams
from .request import Request

if TYPE_CHECKING:
    from .engine import LLMEngine

NOTHING = SamplingParams(max_tokens=1)  # an embedding samples nothing


class EmbeddingRequest(Request):
    """A request for the mean of the hidden states of all tokens behind the final norm, divided by its length.

    Sums are float64, one token after the other in the order of their positions, so the bits depend on the model and the
    tokens alone. The sum survives preemption: what is computed again is not added again. Every token has to be
    computed, so the prefix cache cannot help; it is not given the pages either: they are free when the request ends.
    """

    pooling = True

    def __init__(
        self,
        prompt: str | None,
        prompt_token_ids: list[int],
        hidden_size: int,
        *,
        sink: Callable[[Any], None],
        **options: Any,
    ) -> None:
        super().__init__(
            "", prompt, prompt_token_ids, NOTHING, max_new_tokens=1, stop_ids=frozenset(), final_only=True, sink=sink,
            **options,
        )  # fmt: skip
        self._total = np.zeros(hidden_size, np.float64)
        self._n_summed = 0

    def hidden_rows_wanted(self, start: int, n: int) -> range:
        """Positions within [start, start + n) whose hidden states the sum still lacks."""
        return range(max(start, self._n_summed), start + n)

    def add(self, hidden: np.ndarray) -> None:
        """The next hidden states, float32 [n, hidden], in order. With the last one the request's branch ends."""
        for row in hidden:
            self._total += row
        self._n_summed += len(hidden)
        if self._n_summed == len(self.prompt_token_ids):
            if np.isfinite(self._total).all():
                self.branches[0].finish("stop")
            else:
                self.branches[0].finish("error", "the hidden states are NaN or infinite")

    def output(self) -> EmbeddingRequestOutput:
        """A snapshot for the caller."""
        branch = self.branches[0]
        return EmbeddingRequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=EmbeddingOutput(
                self._vector() if branch.finish_reason == "stop" else None, branch.finish_reason, branch.stop_reason
            ),
            finished=self.finished,
        )

    def _vector(self) -> np.ndarray:
        mean = self._total / len(self.prompt_token_ids)
        length = math.sqrt(math.fsum(mean * mean))
        return (mean / length if length > 0 else mean).astype(np.float32)


def embed(engine: "LLMEngine", token_ids: Iterable[int]) -> np.ndarray:
    """The vector of a prompt, float32 [hidden]; EmbeddingRequest says what it is. Runs steps until it is there, which
    advance all other requests, too. Raises ValueError as add_request does, PoolExhausted if pages are held outside the
    engine, RuntimeError if the request failed or was aborted."""
    request_id, box = engine.subscribe_embedding(list(token_ids))
    try:
        while not box:
            engine.pump()
    finally:
        engine.unsubscribe(request_id)
    found = box[-1].outputs
    if found.embedding is None:
        raise RuntimeError(f"the embedding ended with {found.finish_reason!r}: {found.stop_reason}")
    return found.embedding
