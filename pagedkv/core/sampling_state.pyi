from collections.abc import Mapping, Sequence
from typing import Any

class SamplingState:
    vocab_size: int
    def __init__(
        self,
        vocab_size: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        index: int = 0,
        min_tokens: int = 0,
        stop_ids: Sequence[int] = (),
        logit_bias: Mapping[int, float] | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        prompt_ids: Sequence[int] = (),
        logprobs: int | None = None,
        typical_p: float = 1.0,
        allowed_token_ids: Sequence[int] | None = None,
    ) -> None: ...
    def accept(self, token: int) -> None: ...
    def set_mask(self, mask: Any) -> None: ...
    @property
    def position(self) -> int: ...
    @property
    def ok(self) -> bool: ...
    @property
    def error(self) -> str | None: ...
    @property
    def token(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int: ...
    @property
    def top(self) -> list[tuple[int, float]]: ...
