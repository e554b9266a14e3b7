"""A request and its branches: everything about an output that must survive waiting, preemption and recomputation."""

from array import array
from collections.abc import Callable
from typing import Any

from .masks import OutputMask
from .outputs import CompletionOutput, FinishReason, RequestOutput, TokenLogprobs
from .params import SamplingParams
from .text import OutputText


def stored_tokens(n_prompt: int, n_new: int) -> int:
    """Tokens whose K/V an output of n_new tokens behind a prompt needs: the last token's is never stored. Validation
    and admission both count with it."""
    return n_prompt + n_new - 1


class Request:
    """One prompt, its parameters and its n branches. Lower `priority` runs first; `arrival` orders equals.

    sink: takes the outputs, on whatever thread steps or aborts, None: step() returns them. doomed: its abort is asked
    for and not yet carried out. pooling: it wants hidden states of all tokens and draws none. All times are
    time.monotonic()'s; metrics.py fills in those of what happens later.
    """

    pooling = False

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        priority: int = 0,
        arrival: int = 0,
        salt: str = "",
        final_only: bool = False,
        sink: Callable[[Any], None] | None = None,
        arrival_time: float = 0.0,
        deadline: float | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.max_new_tokens = max_new_tokens
        self.stop_ids = stop_ids
        self.priority = priority
        self.arrival = arrival
        self.salt = salt
        self.final_only = final_only
        self.sink = sink
        self.arrival_time = arrival_time
        self.deadline = deadline
        self.doomed = False
        self.scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.n_preemptions = 0
        self.branches: list[Branch] = []
        self.forked = False
        self.num_cached_tokens: int | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]

    @property
    def finished(self) -> bool:
        """Whether every branch is."""
        return None not in [branch.finish_reason for branch in self.branches]

    @property
    def max_stored_tokens(self) -> int:
        """Tokens of a branch whose K/V may ever be stored: all but the last one drawn."""
        return stored_tokens(len(self.prompt_token_ids), self.max_new_tokens)

    def prompt_rows_wanted(self, start: int, n: int) -> range:
        """Positions within [start, start + n) whose logits the prompt's logprobs still need."""
        if self.prompt_logprobs is None:
            return range(0)
        return range(max(start, len(self.prompt_logprobs) - 1), min(start + n, len(self.prompt_token_ids) - 1))

    def hidden_rows_wanted(self, start: int, n: int) -> range:
        """Positions within [start, start + n) whose hidden states are wanted behind the final norm."""
        return range(0)

    def output(self) -> Any:
        """A snapshot for the caller."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[branch.output() for branch in self.branches],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens or 0,
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
        )


class Branch:
    """One of a request's outputs.

    `tokens` is prompt and output; `seq` holds the K/V of their first len(seq), or is None while the branch waits;
    n_published of its pages are in the prefix cache; `lookup` is what speculation remembers of it. Everything else is
    independent of where and when the branch is computed.
    """

    def __init__(self, request: Request, index: int, state: Any, text: OutputText) -> None:
        self.request = request
        self.index = index
        self.tokens = array("i", request.prompt_token_ids)
        self.state = state
        self.text = text
        self.mask: OutputMask | None = None
        self.seq: Any = None
        self.n_published = 0
        self.last_step = 0
        self.lookup: Any = None
        self.token_time: float | None = None
        self.logprobs: list[TokenLogprobs] | None = None if request.params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.key = (request.priority, request.arrival, index)

    @property
    def n_outputs(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens drawn so far."""
        return self.tokens[len(self.request.prompt_token_ids) :].tolist()

    @property
    def n_pending(self) -> int:
        """Tokens whose K/V is still to be computed; 1 while decoding."""
        return len(self.tokens) - (0 if self.seq is None else len(self.seq))

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the output; the first reason stays."""
        if self.finish_reason is None:
            self.text.finish()
            self.finish_reason, self.stop_reason = reason, stop_reason

    def output(self) -> CompletionOutput:
        """A snapshot for the caller."""
        return CompletionOutput(
            index=self.index,
            text=self.text.text,
            token_ids=self.output_token_ids,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            cumulative_logprob=self.cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
