"""What the engine hands back: snapshots a caller may keep, never changed afterwards."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort", "error"]


class Logprob(float):
    """A float32 log-probability under the raw logits (before temperature, penalties and bias), usable as a float.

    `rank`: 1 for the most likely token; `decoded_token`: its text alone.
    """

    __slots__ = ("decoded_token", "rank")
    rank: int
    decoded_token: str

    def __new__(cls, value: float, rank: int, decoded_token: str) -> "Logprob":
        self = super().__new__(cls, value)
        self.rank = rank
        self.decoded_token = decoded_token
        return self

    def __getnewargs__(self) -> tuple[float, int, str]:  # type: ignore[override]
        return float(self), self.rank, self.decoded_token

    @property
    def logprob(self) -> float:
        """The value as a plain float."""
        return float(self)

    def __repr__(self) -> str:
        return f"Logprob({float(self)!r}, rank={self.rank}, decoded_token={self.decoded_token!r})"


TokenLogprobs = dict[int, Logprob]


@dataclass(frozen=True)
class CompletionOutput:
    """One of a request's n outputs so far.

    text: without stop strings and stop tokens, and without what may still become part of a stop string or is an
    unfinished character; grows only at its end. token_ids: everything drawn, a stop token included.
    logprobs: one dict per token (the chosen token, then the best in order), None unless asked for.
    cumulative_logprob: sum over token_ids. finish_reason: None while running. stop_reason: the stop string or stop
    token id that ended it, or what went wrong in words when finish_reason is "error".
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    cumulative_logprob: float
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """A request's outputs so far.

    prompt: the text, None if token ids were given. prompt_logprobs: one entry per prompt token computed so far, the
    first None; None unless asked for. num_cached_tokens: prompt tokens whose K/V came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(frozen=True, eq=False)
class EmbeddingOutput:
    """embedding: float32 [hidden], of length 1; None unless finish_reason is "stop". stop_reason: what went wrong in
    words when finish_reason is "error", "timeout" for an abort by the deadline."""

    embedding: np.ndarray | None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, eq=False)
class EmbeddingRequestOutput:
    """What LLM.embed() gives for a prompt. prompt: the text, None if token ids were given. num_cached_tokens: always 0,
    since the hidden states of every token are needed."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool
    num_cached_tokens: int = 0
