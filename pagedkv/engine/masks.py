"""Masks of allowed tokens, worked out by threads of their own while the forward runs."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import forks
from .checks import explained, shown
from .outputs import FinishReason
from .params import LogitsMask
from .structured import FIELD, GrammarMask

N_THREADS = 4
ALL_BANNED = "every token is banned"  # as SamplingState says it


class MaskWorkers:
    """A few threads, started by the first mask and anew after a fork, which waits for what they work on. Not
    thread-safe; the engine locks around it."""

    def __init__(self) -> None:
        self._executor: Any = None
        self._unfinished: set[Any] = set()
        forks.watch(self)

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """The future of work(*arguments)."""
        if self._executor is None:
            from concurrent.futures import ThreadPoolExecutor

            self._executor = ThreadPoolExecutor(N_THREADS, thread_name_prefix="pagedkv-mask")
        future = self._executor.submit(work, *arguments)
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        return future

    def close(self) -> None:
        """Let the threads end; idempotent."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        self._executor = None

    def before_fork(self) -> None:
        """Wait for the masks being worked out: half of one is of no use to the child."""
        for future in list(self._unfinished):
            future.exception()

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """Go on without the threads, which stayed in the parent."""
        self._executor = None


class OutputMask:
    """What the next token of one output may be: everything that all of `sources` allow.

    prepare() starts the work, result() returns the mask. A source that fails bans every token, which ends its output
    alone, and leaves what went wrong in `error`.
    """

    def __init__(self, workers: MaskWorkers, sources: Sequence[LogitsMask], vocab_size: int) -> None:
        self._workers = workers
        self._sources = sources
        self._vocab_size = vocab_size
        self.future: Any = None
        self.error: str | None = None

    def prepare(self, token_ids: list[int]) -> None:
        """Start working out what may follow `token_ids`, the output so far."""
        self.future = self._workers.submit(self._work, token_ids)

    def end(self, token_ids: list[int]) -> tuple[FinishReason, str | None] | None:
        """Why the output ends with `token_ids`, as Branch.finish() takes it: nothing can follow them, or a source
        failed. None if it may go on."""
        try:
            if any(source.complete(token_ids) for source in self._sources if isinstance(source, GrammarMask)):
                return "stop", None
        except Exception as failure:
            return "error", explained(failure)
        return None

    def ready(self, timeout: float = 0.0) -> bool:
        """Whether result() need not wait, after at most `timeout` seconds."""
        if not self.future.done() and timeout > 0:
            wait_for_any([self], timeout)
        return self.future.done()

    def result(self) -> np.ndarray | None:
        """The mask that prepare() asked for, as SamplingState.set_mask() takes it. Blocks without the GIL."""
        failure = self.future.exception()
        if failure is None:
            return self.future.result()
        self.error = explained(failure)
        return np.zeros(self._n_words, np.uint32)

    def explained(self, error: str) -> str:
        """Why no token could be drawn, where sampling says `error`."""
        if self.error is None and error == ALL_BANNED and any(isinstance(each, GrammarMask) for each in self._sources):
            return f"{FIELD}: no token that can come next is among those the other parameters allow"
        return self.error or error

    @property
    def _n_words(self) -> int:
        return -(-self._vocab_size // 32)

    def _work(self, token_ids: list[int]) -> np.ndarray | None:
        whole = None
        for source in self._sources:
            mask = source.allowed(list(token_ids))
            if mask is not None:
                mask = self._checked(mask)
                whole = mask if whole is None else whole & mask
        return whole

    def _checked(self, mask: Any) -> np.ndarray:
        if not isinstance(mask, np.ndarray) or mask.dtype != np.uint32 or mask.ndim != 1 or len(mask) < self._n_words:
            got = f"{mask.dtype} {mask.shape}" if isinstance(mask, np.ndarray) else shown(mask)
            raise ValueError(f"logits_mask.allowed() must return None or uint32 [n >= {self._n_words}], not {got}")
        return mask[: self._n_words].copy()


def wait_for_any(masks: Sequence[OutputMask], timeout: float) -> None:
    """Wait until result() of one of them need not wait, at most `timeout` seconds."""
    from concurrent.futures import FIRST_COMPLETED, wait

    wait([mask.future for mask in masks], timeout, FIRST_COMPLETED)
