"""One vector for a prompt: the mean of its last hidden states."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import PoolExhausted

if TYPE_CHECKING:
    from .engine import LLMEngine


def embed(engine: "LLMEngine", token_ids: Iterable[int]) -> np.ndarray:
    """The mean of the hidden states of all tokens behind the final norm, divided by its length: float32 [hidden].

    Sums are float64 in the order of the tokens, the length's is exact, so the bits depend on the model and the tokens
    alone. Runs between two steps, as one prefill in chunks of a step's budget; requests that stand in the way give
    their pages up and are computed again later, to the same bits. Any thread; holds the engine's lock, releases the GIL
    while computing. Raises ValueError as add_request does, PoolExhausted if pages are held outside the engine.
    """
    ids = engine.admission.checked_ids(token_ids)
    engine.admission.refuse_unfit(len(ids), 0)
    mean = engine.between_steps(_sum, engine, ids) / len(ids)
    length = math.sqrt(math.fsum(mean * mean))
    return (mean / length if length > 0 else mean).astype(np.float32)


def _sum(engine: "LLMEngine", ids: list[int]) -> np.ndarray:
    """Of all hidden states, float64 [hidden]."""
    forward, kv, budget = engine.model.forward, engine.kv, engine.scheduler.max_num_batched_tokens
    total = np.zeros(forward.hidden_size, np.float64)
    seq = kv.sequence()
    try:
        for start in range(0, len(ids), budget):
            chunk = np.array(ids[start : start + budget], np.int32)
            _extend(engine, seq, len(chunk))
            hidden = np.empty((len(chunk), forward.hidden_size), np.float32)
            rows = np.arange(len(chunk), dtype=np.int32)
            forward.run(kv, [seq], chunk, np.array([len(chunk)], np.int32), rows, None, hidden)
            for row in hidden:
                total += row
    finally:
        seq.free()
    return total


def _extend(engine: "LLMEngine", seq: Any, n: int) -> None:
    while True:
        try:
            seq.extend(n)
            return
        except PoolExhausted:
            if not engine.scheduler.preempt_last():
                raise
