"""What the engine counts: totals, histograms of fixed buckets, and one log line for each request that ended."""

import logging
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .outputs import FinishReason
from .request import Branch, Request

if TYPE_CHECKING:
    from .scheduler import Chunk

logger = logging.getLogger("pagedkv.engine")

# seconds
LATENCIES = tuple(
    round(digit * 10.0**power, 9) for power in range(-3, 3) for digit in (1.0, 2.5, 5.0)
)  # fmt: skip
# tokens
SIZES = tuple(float(2**power) for power in range(15))

# the reason of a request whose outputs ended differently: the gravest
GRAVITY: tuple[FinishReason, ...] = ("error", "abort", "length", "stop")


class Histogram:
    """Counts of values in the buckets (-inf, b0], (b0, b1], ... (bn, inf), and their sum; unit as of the values."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """(bound, number of values <= bound) of each bucket, the last bound infinite; as Prometheus has it."""
        total, found = 0, []
        for bound, n in zip((*self.bounds, float("inf")), list(self.counts), strict=True):
            total += n
            found.append((bound, total))
        return found


class EngineMetrics:
    """Counters and histograms since the engine was made; written by the thread that steps, read by any.

    Named as vLLM names them, without its prefix and the `_total` of counters. Times are of time.monotonic(); a token's
    time is the end of the sampling of its step.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0  # of requests whose prompt is computed, cached ones included
        self.generation_tokens = 0
        self.requests: dict[FinishReason, int] = dict.fromkeys(GRAVITY, 0)  # ended, by reason
        self.timeouts = 0  # of those aborted, by their deadline
        self.iteration_tokens_total = Histogram(SIZES)  # tokens computed in a step, drafts included
        self.time_to_first_token_seconds = Histogram(LATENCIES)
        self.inter_token_latency_seconds = Histogram(LATENCIES)  # between steps that gave an output tokens, per token
        self.e2e_request_latency_seconds = Histogram(LATENCIES)
        self.request_queue_time_seconds = Histogram(LATENCIES)  # until the first token was computed
        self.request_prefill_time_seconds = Histogram(LATENCIES)  # from there to the first output token
        self.request_decode_time_seconds = Histogram(LATENCIES)  # from there to the last
        self.request_prompt_tokens = Histogram(SIZES)
        self.request_generation_tokens = Histogram(SIZES)
        self._begun = self._now = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._begun = time.monotonic()

    def sampled(self, chunks: "Iterable[Chunk]") -> None:
        """The step has computed `chunks`; tokens() follows for what it drew."""
        self._now = time.monotonic()
        n_tokens = 0
        for chunk in chunks:
            n_tokens += chunk.n_rows
            request = chunk.branch.request
            if request.scheduled_time is None:
                request.scheduled_time = self._begun
                self.request_queue_time_seconds.observe(self._begun - request.arrival_time)
        self.iteration_tokens_total.observe(n_tokens)

    def tokens(self, branch: Branch, n: int) -> None:
        """The step gave the output n tokens, one after the other."""
        if n == 0:
            return
        now, before = self._now, branch.token_time
        branch.token_time = now
        self.generation_tokens += n
        if before is not None:
            self.inter_token_latency_seconds.observe((now - before) / n, n)
            return
        request = branch.request
        if n > 1:
            self.inter_token_latency_seconds.observe(0.0, n - 1)
        if request.first_token_time is None:
            request.first_token_time = now
            self.prompt_tokens += len(request.prompt_token_ids)
            self.time_to_first_token_seconds.observe(now - request.arrival_time)

    def embedded(self, request: Request) -> None:
        """The step has computed the last of a prompt whose vector is wanted."""
        self.prompt_tokens += len(request.prompt_token_ids)
        if request.scheduled_time is not None:
            self.request_prefill_time_seconds.observe(self._now - request.scheduled_time)

    def ended(self, request: Request) -> None:
        """The request has handed out its last output."""
        now = time.monotonic()
        reasons = {branch.finish_reason for branch in request.branches}
        reason = next(reason for reason in GRAVITY if reason in reasons)
        n_output = sum(branch.n_outputs for branch in request.branches)
        self.requests[reason] += 1
        if any(branch.finish_reason == "abort" and branch.stop_reason == "timeout" for branch in request.branches):
            self.timeouts += 1
        self.e2e_request_latency_seconds.observe(now - request.arrival_time)
        self.request_prompt_tokens.observe(len(request.prompt_token_ids))
        if not request.pooling:
            self.request_generation_tokens.observe(n_output)
        first = request.first_token_time
        if first is not None and request.scheduled_time is not None:
            self.request_prefill_time_seconds.observe(first - request.scheduled_time)
            last = max(branch.token_time or first for branch in request.branches)
            self.request_decode_time_seconds.observe(last - first)
        if logger.isEnabledFor(logging.DEBUG):
            self._log(request, reason, n_output, now)

    def _log(self, request: Request, reason: FinishReason, n_output: int, now: float) -> None:
        arrival, scheduled, first = request.arrival_time, request.scheduled_time, request.first_token_time
        fields = {
            "request_id": request.request_id,
            "finish_reason": reason,
            "stop_reason": next((b.stop_reason for b in request.branches if b.finish_reason == reason), None),
            "n": len(request.branches),
            "priority": request.priority,
            "prompt_tokens": len(request.prompt_token_ids),
            "cached_tokens": request.num_cached_tokens or 0,
            "generation_tokens": n_output,
            "preemptions": request.n_preemptions,
            "queue_s": None if scheduled is None else round(scheduled - arrival, 6),
            "ttft_s": None if first is None else round(first - arrival, 6),
            "e2e_s": round(now - arrival, 6),
        }
        text = " ".join(f"{name}={value!r}" for name, value in fields.items())
        logger.debug("request ended: %s", text, extra={"request": fields})
